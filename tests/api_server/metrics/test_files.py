"""Figures that are shared by files, where there is room for them and where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COUNT = """
import asyncio, logging, os
from api_server.metrics.collector import Metrics, Outcome
logging.basicConfig()
{before}
paths = ["/v1/a-longer-path-than-most/" + str(n) for n in range(100)]
outcomes = [value for name, value in vars(Outcome).items() if name.isupper()]
metrics = Metrics("m" * 100, paths)
async def use():
    for path in paths:
        metrics.received(path)
        for outcome in outcomes:
            metrics._count(path, outcome)
    metrics.write()
asyncio.run(use())
text = metrics.exposition(None).decode()
print(sum(line.startswith("tokenyard_requests_total{{") for line in text.splitlines()) - len(paths) * len(outcomes))
"""


def run(directory: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COUNT.format(before=before)],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_all_figures_fit_in_what_is_reserved(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.stdout.strip() == "0", done.stderr
    files = {path.name.partition("_")[0]: path.stat() for path in tmp_path.iterdir()}
    assert {kind: (stat.st_size, stat.st_blocks * 512) for kind, stat in files.items()} == {
        "counter": (1 << 18, 1 << 18),
        "histogram": (1 << 17, 1 << 17),
    }


def test_without_room_a_process_counts_alone_and_says_so(tmp_path: Path) -> None:
    full = (
        "import errno\ndef full(*_): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\nos.posix_fallocate = full"
    )
    done = run(tmp_path, full)
    assert done.stdout.strip() == "0", done.stderr
    assert "takes no metrics (No space left on device)" in done.stderr
    assert list(tmp_path.iterdir()) == []
