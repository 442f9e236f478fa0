"""Tokenizers load from whichever files there are, and never by running code of a repository."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.embedded_model import EMBEDDED_MODEL_PATH
from shared import tokenizer_files
from shared.tokenizer_files import load_tokenizer

CODE = "open({!r}, 'w').write('x')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model with ünicode"
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(Path(EMBEDDED_MODEL_PATH) / name, path / name)
    return path


def alter(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("mapped", [{"AutoTokenizer": [None, "code.XTokenizer"]}, ["code.XTokenizer", None]])
def test_code_is_never_run_and_tokenizer_json_is_enough(
    mapped: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "code.py").write_text(CODE.format(str(tmp_path / "ran")))
    alter(folder / "tokenizer_config.json", auto_map=mapped, tokenizer_class="XTokenizer")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert load_tokenizer(str(folder)).is_fast
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"names code of its own \(auto_map\), which is never run"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_config_with_errors_is_not_the_tokenizers_fault(folder: Path) -> None:
    alter(folder / "config.json", num_attention_heads="4")
    assert load_tokenizer(str(folder)).is_fast


def test_missing_and_unfetched_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json: it is a git-lfs pointer"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="there is no tokenizer in the folder"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model"])
def test_the_package_of_another_librarys_file_is_named(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(b"\x00\x01")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"{name} is .*not installed: pip install 'tokenyard\[tokenizers\]'"):
        tokenizer_files.load_tokenizer(str(folder))
