"""The release of the product that this process runs."""

from __future__ import annotations

import importlib.metadata


def release() -> str:
    """The installed version; a source tree without an installation has none."""
    try:
        return importlib.metadata.version("tokenyard")
    except importlib.metadata.PackageNotFoundError:
        return "0+uninstalled"
