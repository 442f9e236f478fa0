"""A secret that the API processes of one server share through its run directory."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_BYTES = 32


def shared_secret(path: Path) -> bytes:
    """The secret in a file, which the first caller makes. Several may call at once."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_bytes(secrets.token_bytes(_BYTES))
    own.chmod(0o600)
    with contextlib.suppress(FileExistsError):
        os.link(own, path)
    own.unlink()
    return path.read_bytes()
