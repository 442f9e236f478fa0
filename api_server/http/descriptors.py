"""Bounds the connections of this process by its file descriptors, and logs when more are wanted.

Where file descriptors run out the event loop drops new connections silently. So some are kept back: for sockets and
files of the process itself, and to answer connections over the limit.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable
from functools import cache

log = logging.getLogger("tokenyard")

KEPT_BACK = 32
QUIET_SECONDS = 60.0

# Called for each connection that is refused: the metrics count them.
watchers: list[Callable[[], None]] = []

_last_line = -QUIET_SECONDS


def are_short(connections: int) -> bool:
    """True for one connection more than can be held. The metrics count it, and the log has a line a minute."""
    global _last_line
    if connections <= most_connections():
        return False
    for count in watchers:
        count()
    now = time.monotonic()
    if now - _last_line >= QUIET_SECONDS:
        _last_line = now
        log.warning(
            "%d connections are open and no more can be held: new ones are answered 503; raise the limit of open files"
            " (ulimit -n, LimitNOFILE=), which is %d, or start more API processes",
            connections - 1,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
    return True


@cache
def most_connections() -> int:
    """Most connections: the limit of open files less those that the process had open at the first call."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 31
    own = len(os.listdir("/proc/self/fd"))
    return max(soft - own - KEPT_BACK, soft // 4)
