"""Files of a model beside its tokenizer: generation_config.json, and the chat template of an older processor."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from interfaces import SamplingParamsGenerationConfigDefaults

log = logging.getLogger("tokenyard")


def eos_ids(tokenizer: Any, config: dict[str, Any]) -> list[int]:
    configured = config.get("eos_token_id") or []
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return list(dict.fromkeys(token for token in ids if token is not None))


def defaults(config: dict[str, Any], eos: list[int]) -> SamplingParamsGenerationConfigDefaults:
    """Values of the file itself; transformers' own class defaults are left out."""
    names = {f.name for f in dataclasses.fields(SamplingParamsGenerationConfigDefaults)} - {"eos_token_id"}
    given = {name: value for name, value in config.items() if name in names and value is not None}
    return SamplingParamsGenerationConfigDefaults(**given, eos_token_id=eos)


def read_generation_config(model: str) -> dict[str, Any]:
    path = _config_file(model)
    if path is None:
        return {}
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        log.warning("generation_config.json of %s is ignored: %s", model, error)
        return {}
    return config if isinstance(config, dict) else {}


def processor_template(model: str) -> str | None:
    """The chat template of the model's processor, in the older file that tokenizers do not read."""
    path = _config_file(model, "chat_template.json")
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("chat_template.json of %s is ignored: %s", model, error)
        return None
    return found if isinstance(found, str) else None


def _config_file(model: str, name: str = "generation_config.json") -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.exists() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        model,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None
