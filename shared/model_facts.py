"""What must be equal in all workers of a scheduler: the version, the model's files, and how its weights are kept.

Two machines have copies of a model's files. Reading gigabytes to compare them would take as long as loading, so a file
counts by its size, its beginning and its end: a header of safetensors or GGUF has every name, shape and place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.pixel_files import INDEX as PIPELINE_INDEX
from shared.settings import Settings

_DIGEST_BYTES = 8
_READ_BYTES = 1 << 20
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
# Fields of a config that name its writer or its place.
_INCIDENTAL = ("_name_or_path", "transformers_version")


def model_facts(settings: Settings) -> dict[str, str]:
    """The facts, in words, by the name for people."""
    model = Path(settings.model)
    # A pipeline of diffusers has its models in folders.
    index = model / PIPELINE_INDEX
    is_pipeline = index.is_file()
    find = model.rglob if is_pipeline else model.glob
    files = sorted(path for pattern in _WEIGHTS for path in find(pattern)) if model.is_dir() else [model]
    return {
        "tokenyard version": _version(),
        "config": _config(index if is_pipeline else model / "config.json"),
        "weights": _digest(part for path in files for part in _ends(path)),
        "quantization": settings.quantization,
        "kv_dtype": settings.kv_dtype,
    }


def _version() -> str:
    try:
        return version("tokenyard")
    except PackageNotFoundError:
        return "unknown"


def _config(path: Path) -> str:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError):
        return "none"
    kept = {name: value for name, value in fields.items() if name not in _INCIDENTAL}
    return _digest([json.dumps(kept, sort_keys=True).encode()])


def _ends(path: Path) -> list[bytes]:
    """The size of a file, its first bytes and its last; nothing of a file that cannot be read."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            first = file.read(_READ_BYTES)
            file.seek(max(0, size - _READ_BYTES))
            return [str(size).encode(), first, file.read(_READ_BYTES)]
    except OSError:
        return []


def _digest(parts: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
