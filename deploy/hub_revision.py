"""Repositories of the hub: a pinned revision of a model, `name@revision`, is downloaded if need be; an adapter must be
in the local cache."""

from __future__ import annotations

import re
from pathlib import Path

from shared.pixel_files import INDEX as PIPELINE_INDEX
from shared.settings import SettingsError

_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)@(?P<revision>[\w][\w./-]*)", re.ASCII)
# Files that a server reads. Others, such as weights in other formats, are not downloaded.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# A repository of an adapter, `owner/name`, with or without a revision.
_ADAPTER = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)


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
    if not any((folder / file).is_file() for file in ("config.json", PIPELINE_INDEX)):
        raise SettingsError(f"model '{name}@{revision}' has no config.json in {folder}: download all of its files")
    return folder


def cached_adapter(path: str) -> Path | None:
    """Return the folder of an adapter that is named as on the hub; None if it is no such name, or a folder here.

    SettingsError if the repository is not in the local cache. Nothing is downloaded.
    """
    found = _ADAPTER.fullmatch(path)
    if found is None or Path(path).exists():
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(found["name"], revision=found["revision"], local_files_only=True))
    except Exception as error:  # the cache raises whatever comes
        raise SettingsError(
            f"{path!r} is no folder here, and the hub's local cache does not have it: name a folder, or download it "
            f"(hf download {found['name']})"
        ) from error
