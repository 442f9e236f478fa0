"""Where a worker runs. Knows neither settings nor models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's number, its device and its epoch. `models`: the number of workers that share the device.

    `local`: the scheduler is on this host.
    """

    index: int
    device: str
    epoch: int
    models: int = 1
    local: bool = True
