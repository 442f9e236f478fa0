"""Environment variables of a server's processes: folders, and the number of threads of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from deploy import machine
from shared.endpoints import RunDirectory
from shared.kernel_cache import forget_old_kernels, kernel_cache_directory


def common_environment(directory: RunDirectory, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Make the environment that every child gets on top of the supervisor's."""
    kernels = kernel_cache_directory(environ)
    if machine.is_writable(kernels):
        forget_old_kernels(kernels)
    else:
        kernels = directory.path / "numba"
    environment = {
        "NUMBA_CACHE_DIR": str(kernels),
        "PROMETHEUS_MULTIPROC_DIR": str(directory.metrics_directory),
        "PYTHONUNBUFFERED": "1",
        # torch makes this folder when it is imported, and would leave it in TMPDIR.
        "TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{directory.path}/torchinductor",
        # Without docstrings transformers cannot be imported, and our assertions are part of the code.
        "PYTHONOPTIMIZE": "",
        # Our packages have common names: a folder `scheduler` where the operator happens to be must not be run.
        "PYTHONSAFEPATH": "1",
    }
    root = Path(__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        paths = [str(root), environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def cpu_share(workers: int, usable: int, visible: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Split the usable cores among the CPU workers, as environment variables for thread counts.

    Empty where the libraries' own choice, all visible cores, is right, or the operator has chosen.
    """
    share = max(1, usable // max(1, workers))
    if share == visible or "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(share), "NUMBA_NUM_THREADS": str(share)}


def one_thread(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Keep a GPU's worker, or one in the background, to one thread, as environment variables, unless the operator has
    chosen.

    The little that it computes on the CPU is no faster on many threads, and these would take others' cores.
    """
    return {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}
