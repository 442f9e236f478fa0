"""One log format for all processes: time, level, role, message, on standard error."""

from __future__ import annotations

import logging
import sys


def configure(role: str, level: str) -> logging.Logger:
    """Sets up the root logger of this process; `role` (api_server:0, scheduler, model_worker:cpu) is in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {role}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpx2", "httpcore2", "numba", "urllib3", "filelock", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return logging.getLogger("tokenyard")
