"""One image on its way. Knows tensors and schedules; knows neither requests nor its neighbours."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model_worker.pixels.adapters import AdapterUse
from model_worker.pixels.family import Conditions, Kept, Size
from model_worker.pixels.step_cache import StepCache


@dataclass(eq=False)
class Canvas:
    """One image on its way. `taken` steps have been taken of those in its schedule."""

    size: Size
    adapter: AdapterUse | None
    guidance: float
    latents: Tensor
    scheduler: Any
    # Those that are left of the schedule's. Some schedules have more than steps were asked for.
    timesteps: Tensor
    # What stays of the image that it began with.
    kept: Kept | None
    generator: torch.Generator
    # The entries of the denoiser's batch: the contrast, if there is guidance, and the description.
    entries: list[Conditions]
    # Steps after which a preview is due.
    due: list[int]
    # The latents that it was last expected to end with.
    expected: Tensor
    cache: StepCache
    taken: int = 0
    # When it began, or was kept, on a clock that never goes back.
    kept_at: float = field(default_factory=time.monotonic)

    @property
    def passes(self) -> int:
        """The steps that it takes."""
        return len(self.timesteps)

    @property
    def timestep(self) -> Tensor:
        return self.timesteps[self.taken]

    @property
    def is_done(self) -> bool:
        return self.taken == self.passes
