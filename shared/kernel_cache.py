"""The folders in which numba keeps compiled kernels between starts.

numba notices a change of the file in which a cached function stands, but not of functions that it calls from other
files: a kernel compiled before such a change would silently go on with the old code. So the kernels of each state of
the sources have a folder of their own, named by a hash of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

# Source states whose kernels are kept; the least recently made folders go first.
KEPT = 4


def kernel_cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return NUMBA_CACHE_DIR where the operator has set it, else a folder in the user's cache for the present
    sources."""
    if environ.get("NUMBA_CACHE_DIR"):
        return Path(environ["NUMBA_CACHE_DIR"])
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tokenyard" / "numba" / _state_of_sources()


def forget_old_kernels(directory: Path) -> None:
    """Remove all but the newest folders beside `directory`, when that is one of ours."""
    if directory.name != _state_of_sources():
        return
    states = sorted(
        (path for path in directory.parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    for path in states[:-KEPT]:
        if path != directory:
            shutil.rmtree(path, ignore_errors=True)


def _state_of_sources() -> str:
    root = Path(__file__).resolve().parents[1] / "model_worker"
    digest = blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
