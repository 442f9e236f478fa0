"""A closed-loop load generator for any OpenAI-compatible server: `python -m benchmarks --help`."""

import os

from shared.kernel_cache import kernel_cache_directory

# Before a kernel is imported: numba would keep those of other sources than the present ones.
os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache_directory()))
