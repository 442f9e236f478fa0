"""LoRA adapters of a pipeline that paints, as diffusers saves them: their files, and digests that name their content.

Knows files; knows neither torch nor diffusers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

# The file of an adapter in its folder.
WEIGHTS_FILE = "pytorch_lora_weights.safetensors"


def adapter_file(folder: str | Path) -> Path:
    """Return the file of an adapter. FileNotFoundError when its folder has none."""
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no adapter for images in {folder}: it has no {WEIGHTS_FILE}; save it by diffusers' "
            "save_lora_weights"
        )
    return path


def digests(folders: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each adapter's content, by its name. OSError for a file that cannot be read."""
    return {name: digest(adapter_file(folder)) for name, folder in folders.items()}


def digest(path: Path) -> str:
    """Return a digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
