"""A network namespace for this process: it reaches its own loopback and nothing else.

What the clients say then goes to the server of the tests, and to nobody else. Knows Linux. Does not know the tests.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def is_alone() -> bool:
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def leave_the_network() -> None:
    """Raises OSError where the system does not allow it. For a process with one thread: user namespaces want that."""
    if is_alone():
        return
    user, group = os.getuid(), os.getgid()
    if user == 0:
        _unshare(_CLONE_NEWNET)
    else:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
