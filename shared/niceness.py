"""Threads that go behind others where cores are few."""

from __future__ import annotations

import os
import threading


def go_behind(niceness: int) -> None:
    """Give the calling thread this niceness, or keep its own where that is higher: only root may lower one.

    On Linux a thread has a niceness of its own.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
