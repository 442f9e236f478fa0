"""A pinned revision of a model on the hub, `name@revision`: its folder in the local cache, downloaded if need be."""

from __future__ import annotations

import re
from pathlib import Path

from shared.settings import SettingsError

_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)@(?P<revision>[\w][\w./-]*)", re.ASCII)
# Files that a server reads. Others, such as weights in other formats, are not downloaded.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def hub_revision(model: str) -> tuple[str, str] | None:
    """Return the name and the revision, if a revision is given."""
    found = _PINNED.fullmatch(model)
    return None if found is None or Path(model).exists() else (found["name"], found["revision"])


def snapshot(name: str, revision: str) -> Path:
    """Return the folder of a revision. SettingsError if it is neither in the cache nor to be had."""
    # Its package takes a moment to import, and few servers want a revision.
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except Exception as error:  # HTTP clients and the cache raise whatever comes
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise SettingsError(
            f"model '{name}@{revision}' is neither in the local cache nor can it be downloaded: {reason}"
        ) from error
    if not (folder / "config.json").is_file():
        raise SettingsError(f"model '{name}@{revision}' has no config.json in {folder}: download all of its files")
    return folder
