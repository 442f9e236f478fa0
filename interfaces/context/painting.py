"""The context of images to be painted from a description, in many denoising passes each.

The pixels of an image depend on the description, its seed, the options and the image that it begins with alone, so an
image that was lost with its worker is painted again as it was. Knows token ids, seeds and sizes; knows neither models
nor pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from interfaces.context.pooling import PoolingContext, PoolingTask
from interfaces.wire.codec import I64
from interfaces.wire.shared_memory import Segments, Shareable, SharedMemoryArray, SharedMemoryError

# Side of a patch. Patches of images are counted in usage and in fair shares.
PATCH_SIDE = 16
# Denoised patches that weigh as much as a token in limits and fair shares.
_PATCHES_OF_A_TOKEN = 64


@dataclass(kw_only=True, eq=False)
class PaintingContext(PoolingContext):
    """The images of one request. They have the same description, and each has a seed.

    `tokens` are the ids of the description, again for each image: they are counted, and the model reads `prompt`.
    `negative_prompt` is None where the client gave none. `steps` is the number of denoising steps that the schedule is
    made for. `guidance_scale` says how closely the description is followed. `previews` of each image are sent while it
    is painted. All images begin with `original`, if there is one: u8[height, width * 3]. `strength`, above 0 and up
    to 1, says how far they may leave it: it is the part of the steps that are taken. `mask`, u8[height, width], is 255
    where the original is painted anew and 0 where it stays. `lora` is the digest of a LoRA adapter's content, or
    empty, and `lora_scale` its strength. Above 0, `step_cache` is the change of predictions up to which steps reuse
    the last one, which is an approximation. ValueError when the values contradict each other, also
    after a journey over the wire.
    """

    wire_tag: ClassVar[str] = "painting"
    noun: ClassVar[str] = "image"
    # That of a pass over 1024x1024 pixels.
    usual_cost: ClassVar[float] = (1024 // PATCH_SIDE) ** 2 / _PATCHES_OF_A_TOKEN

    task: PoolingTask = PoolingTask.PAINT
    seeds: I64
    prompt: str
    height: int
    width: int
    steps: int
    guidance_scale: float = 1.0
    negative_prompt: str | None = None
    previews: int = 0
    original: Shareable | None = None
    mask: Shareable | None = None
    strength: float = 1.0
    lora: str = ""
    lora_scale: float = 1.0
    step_cache: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.seeds, np.ndarray) or self.seeds.dtype != np.int64 or self.seeds.shape != (len(self),):
            raise ValueError(f"seeds must have one int64 for each of the {len(self)} images, got {self.seeds!r:.80}")
        if self.seeds.min() < 0:
            raise ValueError(f"seeds must be at least 0, got {int(self.seeds.min())}")
        for name in ("height", "width", "steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.previews < 0:
            raise ValueError(f"previews must be at least 0, got {self.previews}")
        if not (math.isfinite(self.guidance_scale) and self.guidance_scale >= 0):
            raise ValueError(f"guidance_scale must be a finite number of at least 0, got {self.guidance_scale}")
        if not 0 <= self.step_cache <= 1:
            raise ValueError(f"step_cache must be from 0 to 1, got {self.step_cache}")
        if not 0 < self.strength <= 1:
            raise ValueError(f"strength must be above 0 and at most 1, got {self.strength}")
        _check_bytes("original", self.original, (self.height, self.width * 3))
        _check_bytes("mask", self.mask, (self.height, self.width))
        if self.mask is not None and self.original is None:
            raise ValueError("mask needs an original: it says which part of it is painted anew")

    @property
    def options(self) -> tuple[object, ...]:
        own = (
            self.prompt,
            self.negative_prompt,
            self.height,
            self.width,
            self.steps,
            self.guidance_scale,
            self.previews,
            self.strength,
            self.lora,
            self.lora_scale,
            self.step_cache,
            # Images of different requests are never taken for the same.
            id(self.original),
            id(self.mask),
        )
        return *super().options, *own

    @property
    def pixels(self) -> int:
        """The pixels of one image."""
        return self.height * self.width

    @property
    def patches(self) -> int:
        """The patches of one image."""
        return math.ceil(self.height / PATCH_SIDE) * math.ceil(self.width / PATCH_SIDE)

    @property
    def costs(self) -> NDArray[np.int64]:
        """An image weighs what is denoised for it."""
        each = math.ceil(self.patches * self.steps_taken / _PATCHES_OF_A_TOKEN)
        return np.arange(len(self) + 1, dtype=np.int64) * each

    @property
    def token_cost(self) -> float:
        """One pass takes a part of what an image weighs."""
        return 1 / self.steps_taken

    @property
    def steps_taken(self) -> int:
        """The steps that are taken of the schedule's: an image that begins with another one skips the first."""
        return self.steps if self.original is None else max(1, int(self.steps * self.strength))

    def inline(self) -> Self:
        """Return the context with its arrays instead of their segments; without them when the segments are gone.

        Their owner removes segments when the request has ended, whose images are not wanted any more.
        """
        try:
            original, mask = (
                array.open() if isinstance(array, SharedMemoryArray) else array for array in (self.original, self.mask)
            )
        except SharedMemoryError:
            return replace(self, original=None, mask=None)
        return replace(self, original=original, mask=mask)

    def share_arrays(self, segments: Segments) -> None:
        if self.original is not None:
            self.original = segments.hold(self.original)
        if self.mask is not None:
            self.mask = segments.hold(self.mask)

    def unshare_arrays(self, segments: Segments) -> None:
        if self.original is not None:
            self.original = segments.give_back(self.original)
        if self.mask is not None:
            self.mask = segments.give_back(self.mask)

    def _further_columns(self, chosen: slice | NDArray[np.bool_]) -> dict[str, Any]:
        return {"seeds": self.seeds[chosen]}

    @classmethod
    def _joined_columns(cls, contexts: Sequence[Self]) -> dict[str, Any]:
        return {"seeds": np.concatenate([context.seeds for context in contexts])}


def _check_bytes(name: str, array: Shareable | None, shape: tuple[int, int]) -> None:
    if array is not None and (np.dtype(array.dtype) != np.uint8 or tuple(array.shape) != shape):
        raise ValueError(f"{name} must be uint8{list(shape)}, got {array.dtype}{list(array.shape)}")
