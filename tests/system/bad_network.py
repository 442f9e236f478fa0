"""A network of two hosts on one machine: a network namespace, and a link whose packets a test delays, loses or drops.

The link is a pair of TUN devices with this process between them, so that nothing of the kernel's traffic control is
needed. It takes root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from typing import Self

TUN = "/dev/net/tun"
_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_PACKET_BYTES = 65536


class NoNetwork(Exception):
    """This machine does not allow a namespace or a TUN device; the text says why."""


class BadNetwork:
    """`with BadNetwork() as network`: this host is `here`, and `inside` runs commands on the other one, `there`."""

    def __init__(self) -> None:
        number = os.getpid() % 62_500
        self._name = f"tokenyard{number}"
        self._devices = f"ty{number}a", f"ty{number}b"
        subnet = f"10.{77 + number // 15_625}.{number // 62 % 252}"
        self.here = f"{subnet}.{number % 62 * 4 + 1}"
        self.there = f"{subnet}.{number % 62 * 4 + 2}"
        # Seconds that each packet takes, and the share of those that are lost.
        self.delay = 0.0
        self.loss = 0.0
        # Whether packets to the other host, and from it, pass.
        self.passes_out = True
        self.passes_back = True
        self._random = random.Random(0)
        self._descriptors: list[int] = []
        self._running = True
        self._thread = threading.Thread(target=self._carry, name="bad network", daemon=True)

    @property
    def inside(self) -> list[str]:
        """What comes before a command that runs on the other host."""
        return ["ip", "netns", "exec", self._name]

    def cut(self) -> None:
        self.passes_out = self.passes_back = False

    def heal(self) -> None:
        self.passes_out = self.passes_back = True
        self.delay = self.loss = 0.0

    def __enter__(self) -> Self:
        try:
            self._descriptors = [_tun(name) for name in self._devices]
            self._configure()
        except (OSError, subprocess.SubprocessError) as error:
            self._remove()
            raise NoNetwork(f"no network namespace or TUN device can be made here: {error}") from None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()
        self._remove()

    def _configure(self) -> None:
        ours, theirs = self._devices
        _ip("netns", "add", self._name)
        _ip("link", "set", theirs, "netns", self._name)
        _ip("addr", "add", self.here, "peer", self.there, "dev", ours)
        _ip("link", "set", ours, "up")
        for arguments in (
            ("addr", "add", self.there, "peer", self.here, "dev", theirs),
            ("link", "set", theirs, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-netns", self._name, *arguments)

    def _remove(self) -> None:
        # A TUN device goes with its descriptor.
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        with contextlib.suppress(OSError):  # without `ip` there is no namespace either
            subprocess.run(["ip", "netns", "del", self._name], capture_output=True, check=False)

    def _carry(self) -> None:
        """Carry packets from one device to the other, when their time has come."""
        ours, theirs = self._descriptors
        waiting: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while self._running:
            timeout = min(max(0.0, waiting[0][0] - time.monotonic()), 0.1) if waiting else 0.1
            for descriptor in select.select([ours, theirs], [], [], timeout)[0]:
                packet = os.read(descriptor, _PACKET_BYTES)
                passes = self.passes_out if descriptor == ours else self.passes_back
                if passes and self._random.random() >= self.loss:
                    target = theirs if descriptor == ours else ours
                    heapq.heappush(waiting, (time.monotonic() + self.delay, next(order), target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                os.write(target, packet)


def _tun(name: str) -> int:
    descriptor = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, timeout=20)
