"""Triton for tests that interpret kernels: from a folder of its own, which no server of the tests has on its path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "triton"


def find_triton() -> None:
    """Let this process import Triton, if `make setup-test` has installed it."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def need_triton() -> None:
    """Skip the tests of the calling module where there is no Triton."""
    find_triton()
    pytest.importorskip("triton", reason="triton is not installed (make setup-test)")
