"""The Dockerfile passes its linter, copies what is there and what is needed, and runs commands that exist."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.cli import main
from shared.settings import FIELDS

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
# Each instruction with its arguments, lines joined.
INSTRUCTIONS = [
    (found[1], found[2].strip())
    for found in re.finditer(
        r"^([A-Z]+) ((?:.*\\\n)*.*)$", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE), re.MULTILINE
    )
]


def arguments_of(name: str) -> list[str]:
    return [arguments for instruction, arguments in INSTRUCTIONS if instruction == name]


def copied() -> list[str]:
    """What comes from the checkout."""
    return [word for arguments in arguments_of("COPY") if "--from" not in arguments for word in arguments.split()[:-1]]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (extra `test`)")
def test_the_linter_is_content() -> None:
    done = subprocess.run([HADOLINT or "", str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr


@pytest.mark.parametrize("path", copied())
def test_what_is_copied_is_there_and_not_ignored(path: str) -> None:
    assert (ROOT / path).exists()
    rules = [line for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines() if line]
    taken = False
    for rule in rules:
        if fnmatch.fnmatch(path, rule.removeprefix("!")):
            taken = rule.startswith("!")
    assert taken


def test_all_packages_are_copied() -> None:
    wanted = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert wanted | {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} == {
        *copied()
    }


def test_the_default_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    [entry], [command] = (json.loads(arguments_of(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert entry in PROJECT["project"]["scripts"]
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: tokenyard serve" in capsys.readouterr().out


def test_variables_are_settings() -> None:
    names = re.findall(r"\bTOKENYARD_(\w+)=", " ".join(arguments_of("ENV")))
    assert names
    assert {name.lower() for name in names} <= {*FIELDS}


def test_extras_exist() -> None:
    [extras] = [found[1] for text in arguments_of("ARG") if (found := re.fullmatch(r"EXTRAS=(.*)", text))]
    assert {*extras.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}


def test_it_does_not_run_as_root() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", arguments_of("USER")[-1])


def test_an_unknown_device_is_refused_before_anything_is_installed() -> None:
    [build] = [text for text in arguments_of("RUN") if "$DEVICE" in text]
    script = build.replace("\\\n", "\n").replace("python -m venv /opt/tokenyard", "exit 99")
    for device, status in (("tpu", 2), ("cpu", 99), ("cuda", 99)):
        environment = {"DEVICE": device, "CPU_INDEX": "https://example.com", "PATH": os.environ["PATH"]}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stderr
    assert "it must be cpu or cuda" in script
