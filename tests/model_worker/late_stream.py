"""A device that is late: what is launched on it reads the host's memory only when something waits for the device.

It tells where memory was written while work that reads it was pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model_worker import device_copy
from model_worker.device_copy import HostRing


class LateStream:
    """A queue of work. `waits` counts marks that were waited for before the device had reached them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched = self.ended = self.waits = 0
        self.overwritten: list[int] = []
        self._pending: deque[Callable[[], None]] = deque()
        stream = self

        class Mark:
            def __init__(self, device: torch.device) -> None:
                assert device.type == "cuda"
                self._at = stream.launched

            def wait(self) -> None:
                stream.waits += self._at > stream.ended
                stream.run(self._at - stream.ended)

        monkeypatch.setattr(device_copy, "Mark", Mark)
        monkeypatch.setattr(device_copy, "pinned_bytes", lambda count: torch.empty(count, dtype=torch.uint8))

    def read(self, memory: Tensor) -> None:
        """Launch work that reads the memory, and finds what is there now, or something else."""
        number, now = self.launched, memory.clone()
        self.launched += 1

        def work() -> None:
            if not torch.equal(memory, now):
                self.overwritten.append(number)

        self._pending.append(work)

    def run(self, count: int) -> None:
        """Let the device end so much of what is pending."""
        for _ in range(max(0, count)):
            self._pending.popleft()()
            self.ended += 1

    def ring(self, places: int | None = None) -> HostRing:
        """Make a ring of memory that this device reads."""
        device = torch.device("cuda")
        return HostRing(device) if places is None else HostRing(device, places)
