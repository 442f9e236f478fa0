"""A pinned revision is served from the hub's cache, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from deploy.hub_revision import hub_revision
from deploy.serve import resolve_model
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
