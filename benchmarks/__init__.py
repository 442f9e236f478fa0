"""Our own figures: `python -m benchmarks --help`. The load generator is deploy/bench."""

import os

from shared.kernel_cache import kernel_cache_directory

# Before a kernel is imported: numba would keep those of other sources than the present ones.
os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache_directory()))
