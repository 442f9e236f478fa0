"""Whose fault it is that a model cannot be loaded, and in which file."""

from __future__ import annotations

import errno
import json
import tracemalloc
from pathlib import Path

import httpx
import pytest

from shared.load_errors import broken_file, may_pass, missing_weights

WEIGHTS = Path(__file__).parents[2] / "deploy" / "embedded_model" / "weights"


def chained(cause: BaseException) -> Exception:
    """As transformers wraps what went wrong."""
    try:
        try:
            raise cause
        except Exception as error:
            raise OSError("We couldn't connect to the hub") from error
    except OSError as error:
        return error


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.ENOMEM, "no memory"),
        OSError(errno.EIO, "disk"),
        httpx.ConnectError("down"),
        ConnectionResetError(),
    ],
)
def test_the_machine_and_the_network_may_recover(cause: Exception) -> None:
    assert may_pass(cause)
    assert may_pass(chained(cause))


@pytest.mark.parametrize("cause", [ValueError("no such parser"), FileNotFoundError(errno.ENOENT, "gone"), OSError("x")])
def test_a_setting_stays_wrong(cause: Exception) -> None:
    assert not may_pass(cause)
    assert not may_pass(chained(cause))


def test_a_whole_model_has_no_broken_file() -> None:
    assert broken_file(str(WEIGHTS)) == ""
    assert broken_file("org/name") == ""


@pytest.mark.parametrize("length", [0, 5, 1000, 500_000])
def test_weights_that_were_cut_off_are_named(tmp_path: Path, length: int) -> None:
    whole = (WEIGHTS / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:length])
    assert str(tmp_path / "model.safetensors") in broken_file(str(tmp_path))


def test_a_header_beyond_the_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    tracemalloc.start()
    try:
        assert "its header has 200000000 bytes; 100000000 are allowed" in broken_file(str(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_deeply_nested_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert broken_file(str(tmp_path)) == f"{tmp_path / 'config.json'}: its lists or objects are nested too deeply"
    header = b"[" * 100_000
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors: its lists or objects are nested too deeply" in broken_file(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    assert "serve its base" in missing_weights(tmp_path)


def test_broken_json_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text('{\n  "version": "1.0"\n  "model": 3\n}')
    found = broken_file(str(tmp_path))
    assert found.startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert "line 3" in found
