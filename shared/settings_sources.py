"""Where settings come from: command line, environment, a TOML file, defaults.

Precedence, highest first: command line, `TOKENYARD_*` environment, TOML file, default. Knows no single setting.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.settings import FIELDS, GUARDS, KINDS, Settings, SettingsError, types_of

ENV_PREFIX = "TOKENYARD_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
# Variables of ours that are no settings: one of interfaces/wire/shared_memory.py, and those of our own children.
_OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, *(ENV_PREFIX + name for name in ("SHM_WATERMARK", "SUPERVISOR_PID", "STATUS_FD", "FORKS"))}
)
# Prefixes of variables that tests and benchmarks read.
_OTHER_PREFIXES = (ENV_PREFIX + "TEST_", ENV_PREFIX + "BENCH_")
_SERVICE = re.compile(r"(TOKENYARD(?:_\w+)?)_SERVICE_HOST", re.ASCII)
# Suffixes of the variables that Kubernetes puts into every container for a service, after the service's name.
_OF_SERVICES = r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"


@dataclass(frozen=True)
class Resolved:
    """Effective settings and, for each field, where its value came from (for `--print-settings`)."""

    settings: Settings
    sources: Mapping[str, str]


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, config: Path | None = None) -> Resolved:
    """Lay command line over environment over TOML over defaults. `flags` holds only the options that were typed.

    Raises SettingsError.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(FIELDS, "default")
    for source, layer in (
        (f"file {config}", _from_toml(config)),
        ("environment", _from_environment(environ)),
        ("command line", dict(flags)),
    ):
        for name, value in layer.items():
            _check_not_empty(name, value, source)
            values[name] = value
            sources[name] = source
    try:
        return Resolved(Settings(**values), sources)
    except SettingsError as error:
        name = str(error).split(" ", 1)[0]
        raise SettingsError(f"{error} (from {sources.get(name, 'unknown')})") from None


def _check_not_empty(name: str, value: Any, source: str) -> None:
    """Refuse an empty value for a setting that guards the server: a secret that is not set, say, was meant to be
    something."""
    if name in GUARDS and not value.strip():
        raise SettingsError(f"{name} is empty (from {source}); give it a value, or leave the setting out")


def config_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file that the environment names. SettingsError when the variable is set to nothing."""
    path = environ.get(CONFIG_VARIABLE)
    if path == "":
        raise SettingsError(f"{CONFIG_VARIABLE} is empty; name a file, or unset it")
    return None if path is None else Path(path)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {name: text for name, text in environ.items() if name not in _of_kubernetes(environ)}
    for name in sorted(ours):
        _check_variable(name)
    found = {name: ours[ENV_PREFIX + name.upper()] for name in FIELDS if ENV_PREFIX + name.upper() in ours}
    return {name: _parse(name, text) for name, text in found.items()}


def _check_variable(name: str) -> None:
    """Refuse a misspelt variable, as a misspelt flag is: ignoring it could leave a server without its keys."""
    spelt = name.upper().replace("-", "_")
    known = {ENV_PREFIX + field.upper() for field in FIELDS} | _OTHER_VARIABLES
    if not spelt.startswith(ENV_PREFIX) or name in known or name.startswith(_OTHER_PREFIXES):
        return
    nearest = difflib.get_close_matches(spelt, sorted(known), 1, 0)[0]
    raise SettingsError(
        f"environment variable {name} is no setting; the nearest one is {nearest}: rename it, or unset it"
    )


def _of_kubernetes(environ: Mapping[str, str]) -> set[str]:
    """Find variables of a Kubernetes service whose name is ours or begins with it. TOKENYARD_PORT can be among them."""
    services = "|".join(found[1] for name in environ if (found := _SERVICE.fullmatch(name)))
    if not services:
        return set()
    made = re.compile(f"({services}){_OF_SERVICES}", re.ASCII)
    return {
        name
        for name, text in environ.items()
        if made.fullmatch(name) and (not name.endswith("_PORT") or name.endswith("_SERVICE_PORT") or "://" in text)
    }


def _from_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"config file {path} cannot be read: {error}") from None
    for name, value in table.items():
        if name not in FIELDS:
            raise SettingsError(f"{name} in {path} is no setting; the settings are: {', '.join(FIELDS)}")
        if type(value) not in types_of(name):
            raise SettingsError(f"{name} in {path} must be {_type_name(name)}, got {value!r}")
    return table


def _parse(name: str, text: str) -> Any:
    kinds = types_of(name)
    try:
        if bool in kinds:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return int(text) if int in kinds and str not in kinds else text
    except (KeyError, ValueError):
        raise SettingsError(f"{ENV_PREFIX}{name.upper()} must be {_type_name(name)}, got {text!r}") from None


def _type_name(name: str) -> str:
    return {bool: "true or false", int: "a whole number", str: "a text"}[KINDS[name]]
