"""A pinned revision is served from the hub's cache, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from deploy.hub_revision import hub_revision
from deploy.model_paths import resolve_adapters, resolve_model
from shared.settings import Settings, SettingsError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that has one revision of one model, under a branch and under its commit."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "config").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/config")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("revision", [COMMIT, "v1"])
def test_a_revision_is_its_folder_in_the_cache(revision: str, cache: Path) -> None:
    found = resolve_model(Settings(model=f"someone/tiny@{revision}"))
    assert Path(found.model) == cache
    assert found.public_model_name == "tiny"
    assert resolve_model(Settings(model=f"someone/tiny@{revision}", served_model_name="x")).public_model_name == "x"


def test_a_revision_that_is_not_there_is_named(cache: Path) -> None:
    with pytest.raises(SettingsError, match="'someone/tiny@v2' is neither in the local cache nor can it be downloaded"):
        resolve_model(Settings(model="someone/tiny@v2"))
    (cache / "config.json").unlink()
    with pytest.raises(SettingsError, match=r"'someone/tiny@v1' has no config\.json"):
        resolve_model(Settings(model="someone/tiny@v1"))


@pytest.mark.parametrize("model", ["someone/tiny", "./a@b", "a@", "@v1", "a b@v1"])
def test_other_names_have_no_revision(model: str) -> None:
    assert hub_revision(model) is None


def test_an_adapter_that_is_named_as_on_the_hub_is_its_folder_in_the_cache(cache: Path) -> None:
    weights = cache / "adapter_model.safetensors"
    for name in ("adapter_config.json", weights.name):
        (cache.parents[1] / "blobs" / name).write_text("{}")
        (cache / name).symlink_to(f"../../blobs/{name}")
    for path in ("someone/tiny@v1", f"someone/tiny@{COMMIT}"):
        found = resolve_adapters(Settings(lora=f"a={path}"))
        assert found.adapter_paths == {"a": str(cache)}
    weights.unlink()
    with pytest.raises(SettingsError, match=r"lora a=someone/tiny@v1: .*has no adapter_model\.safetensors"):
        resolve_adapters(Settings(lora="a=someone/tiny@v1"))


@pytest.mark.parametrize("path", ["someone/else", "someone/tiny@v2", "someone/tiny"])
def test_an_adapter_that_is_not_in_the_cache_is_named(path: str, cache: Path) -> None:
    with pytest.raises(SettingsError, match=f"lora a={path}: '{path}' is no folder here, and the hub's local cache"):
        resolve_adapters(Settings(lora=f"a={path}"))
