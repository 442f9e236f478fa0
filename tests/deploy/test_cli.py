"""The command line: help that teaches, flags made from the settings, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.cli import main, settings_as_toml
from deploy.machine import torch_version
from shared.settings import FIELDS, GUARDS, KINDS, Settings
from shared.settings_sources import resolve
from tests.shared.test_settings import layers


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TOKENYARD_")]:
        monkeypatch.delenv(name)


def run(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *argv],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **(env or {})},
    )


def test_help_names_every_setting_with_its_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in FIELDS:
        assert f"TOKENYARD_{name.upper()}" in text
        assert name == "model" or f"--{name.replace('_', '-')}" in text
        assert KINDS[name] is not bool or f"--no-{name.replace('_', '-')}" in text
    assert "default 8000" in text
    assert "examples:" in text
    assert "precedence: command line, then" in text


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.returncode == 0
    for command in ("serve", "chat", "keys", "worker", "status", "why", "doctor", "version"):
        assert command in result.stdout


def test_print_settings_shows_where_each_value_came_from(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text("max_running = 7\nport = 1111\n")
    argv = ["serve", "some/model", "--config", str(config), "--no-overlap", "--print-settings"]
    result = run(*argv, env={"TOKENYARD_PORT": "2222", "TOKENYARD_OVERLAP": "true"})
    assert result.returncode == 0
    shown = {line.split(" ", 1)[0]: line for line in result.stdout.splitlines()}
    assert shown["model"].split() == ["model", "=", '"some/model"', "#", "command", "line"]
    assert shown["port"].split() == ["port", "=", "2222", "#", "environment"]
    assert shown["overlap"].split() == ["overlap", "=", "false", "#", "command", "line"]
    assert shown["max_running"].split() == ["max_running", "=", "7", "#", "file", str(config)]
    assert shown["dtype"].split() == ["dtype", "=", '"auto"', "#", "default"]


def test_the_config_file_can_come_from_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text("max_running = 7\n")
    assert "max_running = 7" in run("serve", "--print-settings", env={"TOKENYARD_CONFIG": str(config)}).stdout


@given(layers)
def test_printed_settings_are_a_config_file(tmp_path_factory: pytest.TempPathFactory, layer: dict[str, Any]) -> None:
    printed = resolve(layer, {})
    file = tmp_path_factory.getbasetemp() / "printed.toml"
    file.write_text(settings_as_toml(printed), encoding="utf-8")
    assert resolve({}, {}, file).settings == printed.settings


@settings(max_examples=30)  # each builds the parsers of all commands
@given(st.data())
def test_any_setting_can_be_typed_as_a_flag(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in FIELDS if name not in ("model", "served_model_name")]))
    value = data.draw(layers.map(lambda layer: layer.get(name, getattr(Settings(), name))))
    if value is None or (value == "" and name in GUARDS):
        return
    flag = f"--{name.replace('_', '-')}"
    # A value that begins with a dash could be another flag, but for the sign.
    typed = [f"{flag}={value}"]
    if KINDS[name] is bool:
        typed = [flag if value else flag.replace("--", "--no-", 1)]
    capture: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", capture.append)
        assert main(["serve", *typed, "--print-settings"]) == 0
    wanted = resolve({name: value}, {})
    assert capture == [settings_as_toml(wanted)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "0"], "port must be 1 to 65535, got 0 (from command line)"),
        (["--devices", "tpu:0"], "devices must be auto, none, or a list of cpu, cuda:N and cuda:N+cuda:M, got 'tpu:0'"),
        (["--config", "/no/such/file.toml"], "config file /no/such/file.toml cannot be read"),
        (["./no/such/model"], "model './no/such/model' is neither a folder here nor a hub name"),
        (["--prot", "80"], "unrecognized arguments: --prot"),
        (["--api-key", ""], "api_key is empty (from command line)"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(argv: list[str], message: str) -> None:
    result = run("serve", *argv)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not torch_version().endswith("+cpu"), reason="this build of torch has CUDA")
@pytest.mark.parametrize("command", [["serve"], ["worker", "tcp://127.0.0.1:1", "--index", "1"]])
def test_a_gpu_is_refused_at_once_where_torch_has_no_cuda(command: list[str]) -> None:
    result = run(*command, "--devices", "cuda:0")
    assert result.returncode == 2
    assert "is a build without CUDA; use cpu, or install one with CUDA" in result.stderr
    assert "'cuda:0'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--max-run", "3"],
        ["serve", "--max-runnin=3"],
        ["serve", "--print"],
        ["serve", "--no-over"],
        ["chat", "--ur", "http://127.0.0.1:1"],
        ["worker", "tcp://127.0.0.1:1", "--ind", "1"],
        ["keys", "folder", "--pe", "box"],
        ["status", "--js"],
        ["why", "abc", "--run", "folder"],
        ["doctor", "--po", "1"],
    ],
    ids=" ".join,
)
def test_flags_may_not_be_abbreviated(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A shortened flag in a unit file would mean something else as soon as another flag begins like it."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "unrecognized arguments: --" in capsys.readouterr().err


SERVE = ["serve"]
WORKER = ["worker", "tcp://127.0.0.1:1", "--index", "1"]
NAMES = ["TOKENYARD_APIKEY", "tokenyard_api_key", "TOKENYARD_API_KEY_FILE"]


# A worker reads no file, so TOKENYARD_CONFIG is the server's alone.
@pytest.mark.parametrize(
    ("name", "command"),
    [("TOKENYARD_CONFIG", SERVE), *((name, command) for name in NAMES for command in (SERVE, WORKER))],
)
def test_a_variable_that_says_nothing_keeps_the_server_from_starting(name: str, command: list[str]) -> None:
    result = run(*command, env={name: ""})
    assert result.returncode == 2
    assert name.removeprefix("TOKENYARD_").lower() in result.stderr.lower()


@pytest.mark.parametrize("name", ["TOKENYARD_API_KEY", "TOKENYARD_ADMIN_API_KEY"])
def test_a_key_in_the_environment_is_nowhere_afterwards(name: str) -> None:
    code = (
        "import argparse, os; from pathlib import Path; from deploy import cli; "
        "cli._forget_secrets(argparse.Namespace(port=8000)); "
        "shown = Path('/proc/self/environ').read_text() + str(dict(os.environ)); "
        "print('a-secret' in shown, Path('/proc/self/cmdline').read_text())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, name: "a-secret"}
    )
    assert result.stdout.startswith(f"False {sys.executable} -c import argparse")


def test_version() -> None:
    result = run("version")
    assert result.returncode == 0
    assert result.stdout.startswith("tokenyard ")


def test_the_command_starts_without_torch_or_transformers() -> None:
    """`tokenyard --help` and the supervisor itself stay quick and small."""
    code = "import sys, deploy.cli; print([m for m in ('torch', 'transformers', 'zmq') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout.strip() == "[]"
