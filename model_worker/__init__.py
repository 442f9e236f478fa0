"""The model worker process: weights, KV tensors, forward and sampling of one device. The only process with torch.

An import of any of it, by the worker itself, a benchmark or a test, finds compiled kernels of these very sources: see
shared/kernel_cache.py. numba reads the variable when it is imported.
"""

import os

from shared.kernel_cache import kernel_cache_directory

os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache_directory()))
