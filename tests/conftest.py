"""Settings for every test: tiny models compute faster on one thread than on two that wait for each other."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
