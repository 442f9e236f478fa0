"""A process that has bounded itself gets so much memory and no more."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from shared.liveness import limit_memory
limit_memory(100 << 20)
kept = bytearray(60 << 20)
try:
    bytearray(200 << 20)
except MemoryError:
    print("refused")
"""


def test_memory_beyond_the_limit_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "refused\n"
