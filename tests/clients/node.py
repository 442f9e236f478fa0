"""What make has installed for node, and why a test has to do without it."""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = Path(__file__).parent
MODULES = FOLDER / "node_modules"


def why_not(package: str) -> str:
    """Nothing, if the package can be run."""
    if shutil.which("node") is None:
        return "node is not installed"
    return "" if (MODULES / package).is_dir() else f"npm has not installed {package}: make test-clients says why"
