"""Settings for every test: tiny models compute faster on one thread than on two that wait for each other.

Hypothesis judges results, not speed: on a loaded machine any example can take longer than its usual deadline.
"""

from __future__ import annotations

import os
import signal

import hypothesis

from shared.kernel_cache import kernel_cache_directory

os.environ["NUMBA_CACHE_DIR"] = str(kernel_cache_directory())
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it runs in the background, and the servers of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("house", deadline=None)
hypothesis.settings.load_profile("house")
