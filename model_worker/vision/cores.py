"""How many cores an image is encoded with: all while no step runs, and some beside steps.

An image takes many times as long as a step, so the number is chosen anew for each layer of the encoder. Knows layers
and times. Does not know who shares the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# Seconds without a step from which on none is expected soon: a stream's next one follows within a few milliseconds.
_QUIET_S = 0.05


class EncoderCores:
    """`layers` are to be run by the thread that encodes, and by no other."""

    def __init__(
        self,
        layers: Iterator[nn.Module],
        beside: int,
        alone: int,
        share: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`beside` and `alone` are numbers of cores: beside steps, and while none runs.

        `share` is called with the cores that an image takes from now on, and with 0 when it is encoded. A step that
        loses a core in the middle of a pass, to a thread that computes for long, takes many times as long as others.
        """
        self._beside = beside
        self._alone = alone
        self._share = share
        self._clock = clock
        self._running = False
        self._last_end = -_QUIET_S
        self._taken = 0
        for layer in layers:
            layer.register_forward_pre_hook(self._before_layer)

    def step_began(self) -> None:
        """A step runs from now on. For the thread that runs the steps."""
        self._running = True
        if self._taken > self._beside:
            # The pass that begins now needs its cores, though the image's layer has its threads until it ends.
            self._share(self._beside)

    def steps_ended(self) -> None:
        """No step runs now. For the thread that runs the steps, which may say so more than once."""
        if self._running:
            self._running = False
            self._last_end = self._clock()

    def take(self) -> None:
        """Take cores for what is computed next."""
        quiet = not self._running and self._clock() - self._last_end >= _QUIET_S
        cores = self._alone if quiet else self._beside
        if cores != self._taken:
            self._taken = cores
            torch.set_num_threads(cores)
            self._share(cores)

    def give_back(self) -> None:
        """The image is encoded."""
        self._taken = 0
        self._share(0)

    def _before_layer(self, layer: nn.Module, arguments: Any) -> None:
        self.take()
