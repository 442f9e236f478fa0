"""Which file a model's name means."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from shared.gguf.find import find_gguf
from shared.gguf.format import GgufError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of hub/name in the local cache, without access to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--hub--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "m.gguf")
    monkeypatch.chdir(tmp_path)
    assert find_gguf("m.gguf") == str(tmp_path / "m.gguf")
    with pytest.raises(GgufError, match=r"'n\.gguf': there is no such file"):
        find_gguf("n.gguf")


def test_a_folder(tmp_path: Path) -> None:
    assert find_gguf(str(tmp_path)) is None
    make(tmp_path, "m.gguf", "mmproj-m.gguf", "config.json")
    assert find_gguf(str(tmp_path)) == str(tmp_path / "m.gguf")
    make(tmp_path, "n.gguf")
    with pytest.raises(GgufError, match=r"has 2 GGUF files; name one of .*m\.gguf, .*n\.gguf"):
        find_gguf(str(tmp_path))
    make(tmp_path, "model.safetensors")
    assert find_gguf(str(tmp_path)) is None


def test_a_folder_of_parts(tmp_path: Path) -> None:
    make(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert find_gguf(str(tmp_path)) == str(tmp_path / "m-00001-of-00002.gguf")


def test_a_quantization_of_the_cache(cache: Path) -> None:
    make(cache, "name-Q4_K_M.gguf", "name-Q4_K_S.gguf", "name-q8_0.gguf", "UD/name-UD-Q4_K_M.gguf")
    assert find_gguf("hub/name:Q4_K_M") == str(cache / "name-Q4_K_M.gguf")
    assert find_gguf("hub/name:Q8_0") == str(cache / "name-q8_0.gguf")
    assert find_gguf("hub/name") is None
    with pytest.raises(GgufError, match=r"no GGUF files of it are Q4_K; name one of these: .*name-Q4_K_M\.gguf"):
        find_gguf("hub/name:Q4_K")


def test_parts_of_the_cache(cache: Path) -> None:
    make(cache, "Q6_K/name-Q6_K-00001-of-00002.gguf")
    with pytest.raises(GgufError, match=r"part name-Q6_K-00002-of-00002\.gguf of the model is missing"):
        find_gguf("hub/name:Q6_K")
    make(cache, "Q6_K/name-Q6_K-00002-of-00002.gguf")
    assert find_gguf("hub/name:Q6_K") == str(cache / "Q6_K/name-Q6_K-00001-of-00002.gguf")


def test_a_name_that_is_not_in_the_cache(cache: Path) -> None:
    with pytest.raises(GgufError, match=r"'hub/other:Q4_0': .* HF_HUB_OFFLINE is set"):
        find_gguf("hub/other:Q4_0")
