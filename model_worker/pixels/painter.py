"""Images that are painted together: each has its own noise and schedule, and joins or leaves between passes.

A pass takes one denoising step of each of its images. Images of one size share a forward pass of the denoiser, whose
timesteps are a vector, if their texts are encoded to one length; an image with guidance has two entries in it. The
pixels of an image depend on its context alone, up to the rounding of sums in float32. Knows contexts and tensors; knows
neither messages nor diffusers.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interfaces import PaintingContext, PoolingTask, mapped
from model_worker.pixels.adapters import AdapterUse, PixelAdapters
from model_worker.pixels.canvas import Canvas
from model_worker.pixels.family import Description, Family, Original, Size, joined
from model_worker.pixels.kept_step import packed, restore
from model_worker.pixels.step_cache import StepCache

log = logging.getLogger(__name__)

# Descriptions whose encoded texts are kept.
KEPT_DESCRIPTIONS = 16
# Seconds of painting after which an image is kept. It is also kept with each preview, which costs more.
SECONDS_BETWEEN_KEPT = 2.0
# Bytes of a mask above it are those of the part that is painted anew.
_HALF = 127


class Preview(NamedTuple):
    """A preview of an image, and its number from 1 on."""

    row: int
    number: int
    pixels: NDArray[np.float32]


class KeptImage(NamedTuple):
    """An image on its way as bytes, after so many of its passes."""

    row: int
    taken: int
    state: bytes


class Pass(NamedTuple):
    """What a pass has made: images by row, f32[height, width * 3], previews, the reasons of rows that failed, and the
    images on their way that are kept now."""

    images: dict[int, NDArray[np.float32]]
    previews: list[Preview]
    errors: dict[int, str]
    kept: list[KeptImage]


@dataclass(eq=False)
class Painter:
    """A loaded pipeline and the images that it paints, by row."""

    family: Family
    adapters: PixelAdapters
    architecture: str
    max_model_len: int
    vocab_size: int
    multiple: int
    _canvases: dict[int, Canvas] = field(default_factory=dict)
    _descriptions: OrderedDict[tuple[object, ...], Description] = field(default_factory=OrderedDict)

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        return frozenset({PoolingTask.PAINT})

    @property
    def dtype(self) -> str:
        return str(self.family.dtype).removeprefix("torch.")

    @property
    def backend(self) -> str:
        """What paints, in words."""
        return "diffusers, a step a pass"

    def __contains__(self, row: int) -> bool:
        return row in self._canvases

    def __len__(self) -> int:
        return len(self._canvases)

    def forget(self) -> None:
        """Drop all images."""
        self._canvases.clear()

    def drop(self, rows: Iterable[int]) -> None:
        """Drop images. Unknown rows are left out."""
        for row in rows:
            self._canvases.pop(row, None)

    @torch.inference_mode()
    def begin(self, row: int, context: PaintingContext, kept: bytes = b"") -> int:
        """Begin the only image of a context, or go on with it from a kept step. Returns the number of its passes.
        ValueError for one that this model cannot paint."""
        wrong = [side for side in (context.height, context.width) if side % self.multiple]
        if wrong:
            raise ValueError(f"height and width must be multiples of {self.multiple}, got {wrong[0]}")
        adapter = AdapterUse(context.lora, context.lora_scale) if context.lora else None
        self.adapters.check(adapter)
        guided = self.family.is_guided(context.guidance_scale, context.negative_prompt)
        size = Size(context.height, context.width)
        self.adapters.switch(adapter)
        described = self._described(context.prompt, context.negative_prompt, guided, adapter)
        generator = torch.Generator("cpu").manual_seed(int(context.seeds[0]))
        begun = self.family.begin(size, context.steps, generator, _original_of(context))
        halves = [described.given] if described.contrast is None else [described.contrast, described.given]
        canvas = Canvas(
            size=size,
            adapter=adapter,
            guidance=context.guidance_scale,
            latents=begun.latents,
            expected=begun.latents,
            due=_due(len(begun.timesteps), context.previews),
            scheduler=begun.scheduler,
            timesteps=begun.timesteps,
            kept=begun.kept,
            cache=StepCache(context.step_cache),
            generator=generator,
            entries=[self.family.conditions(half, size, context.guidance_scale) | begun.conditions for half in halves],
        )
        if kept:
            try:
                restore(canvas, kept)
            except ValueError as error:
                log.warning("an image begins again: %s", error)
        self._canvases[row] = canvas
        return canvas.passes

    @torch.inference_mode()
    def advance(self, rows: Sequence[int]) -> Pass:
        """Take one step of each of these images, and decode those that are done. Unknown rows are left out."""
        groups: defaultdict[tuple[Size, AdapterUse | None], list[int]] = defaultdict(list)
        for row in rows:
            if row in self._canvases:
                groups[self._canvases[row].size, self._canvases[row].adapter].append(row)
        errors: dict[int, str] = {}
        for (_, adapter), members in groups.items():
            self.adapters.switch(adapter)
            errors |= self._step(members)
        self.drop(errors)
        images: dict[int, NDArray[np.float32]] = {}
        for row in [row for members in groups.values() for row in members if row in self._canvases]:
            canvas = self._canvases[row]
            if not canvas.is_done:
                continue
            del self._canvases[row]
            pixels = self._decoded(canvas.latents, canvas.size)
            if np.isfinite(pixels).all():
                images[row] = pixels
            else:
                errors[row] = (
                    f"the pixels of {self.architecture} are not finite: its weights are broken, or {self.dtype} is too "
                    "narrow for it; serve it with --dtype float32"
                )
        return Pass(images, self._previews(groups.values()), errors, self._kept())

    def _previews(self, groups: Iterable[list[int]]) -> list[Preview]:
        """Decode the previews that are due after a pass over these rows. One that is not finite is left out."""
        previews = []
        for row in [row for members in groups for row in members if row in self._canvases]:
            canvas = self._canvases[row]
            if canvas.taken in canvas.due:
                pixels = self._decoded(canvas.expected, canvas.size)
                if np.isfinite(pixels).all():
                    previews.append(Preview(row, canvas.due.index(canvas.taken) + 1, pixels))
        return previews

    def _kept(self) -> list[KeptImage]:
        """Keep the images that have been painted for a while since they began or were kept, or had a preview now."""
        now = time.monotonic()
        due = [
            row
            for row, canvas in self._canvases.items()
            if canvas.taken in canvas.due or now - canvas.kept_at >= SECONDS_BETWEEN_KEPT
        ]
        found = []
        for row in due:
            canvas = self._canvases[row]
            canvas.kept_at = now
            state = packed(canvas) if canvas.taken else None
            if state is not None:
                found.append(KeptImage(row, canvas.taken, state))
        return found

    def _decoded(self, latents: Tensor, size: Size) -> NDArray[np.float32]:
        """Return the pixels of latents, f32[height, width * 3]."""
        pixels: NDArray[np.float32] = self.family.pixels(latents, size).cpu().numpy()
        return pixels.reshape(size.height, size.width * 3)

    def _step(self, rows: Sequence[int]) -> dict[int, str]:
        """Take a step of images of one size. Returns the reasons of those that cannot take it."""
        reused = {row: self._reused(row) for row in rows}
        errors = self._walk({row: noise for row, noise in reused.items() if noise is not None})
        return errors | self._compute([row for row, noise in reused.items() if noise is None])

    def _reused(self, row: int) -> Tensor | None:
        canvas = self._canvases[row]
        return canvas.cache.reused(canvas.taken + 1 == canvas.passes)

    def _compute(self, rows: Sequence[int]) -> dict[int, str]:
        """Run the denoiser for images that share a forward pass, and take their step. Returns as `_step`."""
        if not rows:
            return {}
        try:
            predicted = self._predicted([self._canvases[row] for row in rows])
        except ValueError as error:
            if len(rows) == 1:
                return {rows[0]: str(error)}
            return {row: why for each in rows for row, why in self._compute([each]).items()}
        found: dict[int, Tensor] = {}
        for row, own in zip(rows, predicted, strict=True):
            canvas = self._canvases[row]
            found[row] = own if len(own) == 1 else self.family.guided(own[:1], own[1:], canvas.guidance)
            canvas.cache.computed(found[row])
        return self._walk(found)

    def _walk(self, predictions: Mapping[int, Tensor]) -> dict[int, str]:
        """Take the step of each image by its prediction. Returns as `_step`."""
        errors: dict[int, str] = {}
        for row, noise in predictions.items():
            canvas = self._canvases[row]
            try:
                canvas.latents, canvas.expected = self.family.step(
                    canvas.scheduler, noise, canvas.timestep, canvas.latents, canvas.generator
                )
            except ValueError as error:
                errors[row] = str(error)
            canvas.taken += 1
            self._restore(canvas)
        return errors

    def _restore(self, canvas: Canvas) -> None:
        """Put what stays of the original in its place again."""
        if canvas.kept is not None:
            following = None if canvas.is_done else canvas.timestep
            canvas.latents = self.family.restored(canvas.scheduler, canvas.latents, canvas.kept, following)
            canvas.expected = self.family.restored(canvas.scheduler, canvas.expected, canvas.kept, None)

    def _predicted(self, canvases: Sequence[Canvas]) -> Sequence[Tensor]:
        """Return what the denoiser predicts for the entries of each of some images of one size.

        It runs once for all entries whose conditions have the same shapes: texts may keep their own lengths.
        """
        groups: defaultdict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
        for i, canvas in enumerate(canvases):
            for j, entry in enumerate(canvas.entries):
                groups[tuple((name, value.shape) for name, value in sorted(entry.items()))].append((i, j))
        scaled = [self._scaled(canvas) for canvas in canvases]
        found: dict[tuple[int, int], Tensor] = {}
        for places in groups.values():
            latents = torch.cat([scaled[i] for i, _ in places])
            timesteps = torch.stack([canvases[i].timestep for i, _ in places])
            conditions = joined([canvases[i].entries[j] for i, j in places])
            predicted = self.family.predict(latents, timesteps, conditions, canvases[0].size)
            found.update(zip(places, torch.split(predicted, 1), strict=True))
        return [torch.cat([found[i, j] for j in range(len(canvas.entries))]) for i, canvas in enumerate(canvases)]

    def _scaled(self, canvas: Canvas) -> Tensor:
        """Return the latents of an image as the denoiser takes them."""
        scale = getattr(canvas.scheduler, "scale_model_input", None)
        scaled: Tensor = canvas.latents if scale is None else scale(canvas.latents, canvas.timestep)
        return scaled

    def _described(
        self, prompt: str, negative_prompt: str | None, guided: bool, adapter: AdapterUse | None
    ) -> Description:
        """Return the encoded texts of a description, which are kept for the next images with it."""
        key = (prompt, negative_prompt if guided else None, guided, adapter)
        found = self._descriptions.pop(key, None)
        if found is None:
            found = self.family.describe(prompt, negative_prompt, guided)
        self._descriptions[key] = found
        if len(self._descriptions) > KEPT_DESCRIPTIONS:
            self._descriptions.popitem(last=False)
        return found


def _original_of(context: PaintingContext) -> Original | None:
    """Return the image that a context's begins with. SharedMemoryError when it is gone."""
    if context.original is None:
        return None
    size = (context.height, context.width)
    # As diffusers has it of an image of 8 bits.
    pixels = torch.from_numpy(mapped(context.original).astype(np.float32) / 255).reshape(1, *size, 3)
    mask = None
    if context.mask is not None:
        mask = torch.from_numpy((mapped(context.mask) > _HALF).astype(np.float32)).reshape(1, 1, *size)
    return Original(2.0 * pixels.permute(0, 3, 1, 2) - 1.0, context.strength, mask)


def _due(passes: int, previews: int) -> list[int]:
    """Return the steps after which previews are due: spread evenly, and none after the last step."""
    steps = [round(passes * i / (previews + 1)) for i in range(1, previews + 1)]
    return sorted({step for step in steps if 0 < step < passes})
