"""Turns what a client asks for into size, steps and tokens of images, or refuses it with the nearest that is possible.

Knows the facts of a pipeline's files; knows neither requests nor the engine.
"""

from __future__ import annotations

import math
import re
import secrets

import numpy as np
from numpy.typing import NDArray

from api_server.errors import invalid, shown
from api_server.pixels.wish import Wish
from api_server.text.tokenizer import Tokenizer
from interfaces import PaintingContext, PoolingTask
from shared.pixel_files import MOST_PIXELS, PixelFiles

# The largest seed. Each image has the next one. torch takes no larger one.
MOST_SEED = (1 << 63) - 1
_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})", re.ASCII)


def context_of(files: PixelFiles, tokenizer: Tokenizer, wish: Wish) -> PaintingContext:
    """The context of the images that a client wants. Raises RequestFailed."""
    height, width = size_of(files, wish.size, wish.width, wish.height)
    if wish.steps is not None and wish.steps > files.most_steps:
        raise invalid(
            f"num_inference_steps must be at most {files.most_steps} for this pipeline, got {wish.steps}",
            "num_inference_steps",
        )
    if wish.negative_prompt and not files.family.contrasts:
        raise invalid(f"negative_prompt: {files.kind} takes none, so leave the field out", "negative_prompt")
    if wish.negative_prompt is not None:
        prompt_ids(files, tokenizer, wish.negative_prompt, "negative_prompt")
    ids = prompt_ids(files, tokenizer, wish.prompt, "prompt")
    steps = wish.steps or files.default_steps
    return PaintingContext.of(
        [ids] * wish.count,
        PoolingTask.PAINT,
        seeds=seeds_of(random_seed() if wish.seed is None else wish.seed, wish.count),
        prompt=wish.prompt,
        negative_prompt=wish.negative_prompt,
        height=height,
        width=width,
        steps=steps,
        guidance_scale=files.default_guidance if wish.guidance_scale is None else wish.guidance_scale,
        previews=wish.previews,
        step_cache=wish.step_cache,
        strength=1.0 if wish.picture is None else strength_of(files, wish, steps),
    )


def strength_of(files: PixelFiles, wish: Wish, steps: int) -> float:
    """How far images may leave the one that they begin with. Raises RequestFailed when that leaves no step, and for
    what the pipeline does not take."""
    if files.family.original == "none":
        field = wish.picture_field
        raise invalid(f"{field}: {files.kind} begins with noise alone: ask /v1/images/generations", field)
    if files.family.original == "refers":
        for name, value in ((wish.mask_field, wish.mask), ("strength", wish.strength)):
            if value is not None:
                raise invalid(f"{name}: {files.kind} reads the image as a reference only: leave the field out", name)
        return 1.0
    default = files.family.strength if wish.mask is None else files.family.mask_strength
    strength = default if wish.strength is None else wish.strength
    if int(steps * strength) < 1:
        raise invalid(
            f"strength: {strength:g} of {steps} steps leaves none: send at least {math.ceil(100 / steps) / 100:g}, or "
            "more num_inference_steps",
            "strength",
        )
    return strength


def size_of(files: PixelFiles, size: str | None, width: int | None, height: int | None) -> tuple[int, int]:
    """The height and width of the images. Raises RequestFailed."""
    default_height, default_width = files.default_size
    if size in (None, "auto"):
        wanted = height or default_height, width or default_width
        return _checked(files, *wanted, _field(files.nearest_size(*wanted), height, width))
    if width is not None or height is not None:
        raise invalid("size and width or height say the same twice: send one of them", "size")
    found = _SIZE.fullmatch(str(size))
    if found is None:
        raise invalid(
            f"size must be auto, or the width and height in pixels such as {default_width}x{default_height}, "
            f"got {shown(str(size))}",
            "size",
        )
    return _checked(files, int(found[2]), int(found[1]), "size")


def _field(nearest: tuple[int, int], height: int | None, width: int | None) -> str:
    """The field to blame for a size, where this height and width were sent, or None."""
    if width is None and height is None:
        return "size"
    return "width" if height is None or (width is not None and nearest[1] != width) else "height"


def _checked(files: PixelFiles, height: int, width: int, field: str) -> tuple[int, int]:
    nearest = files.nearest_size(height, width)
    if nearest != (height, width):
        raise invalid(
            f"{field}: {width}x{height} is not possible: both sides must be multiples of {files.multiple} up to "
            f"{files.longest_side}, with at most {MOST_PIXELS} pixels together; the nearest size is "
            f"{nearest[1]}x{nearest[0]}",
            field,
        )
    return nearest


def prompt_ids(files: PixelFiles, tokenizer: Tokenizer, text: str, field: str) -> list[int]:
    """The token ids of a description. Raises RequestFailed when the model would not read all of it."""
    ids: list[int] = tokenizer.backend.encode(text).ids
    most = files.longest_prompt
    if len(ids) > most:
        raise invalid(
            f"{field} has {len(ids)} tokens, and this model reads at most {most}, with the marks of beginning and end: "
            "shorten it",
            field,
        )
    # A tokenizer without marks makes no token of an empty description, and a context has one at least.
    return ids or [0]


def random_seed() -> int:
    """A seed that no client has to know."""
    return secrets.randbits(62)


def seeds_of(first: int, count: int) -> NDArray[np.int64]:
    """The seeds of so many images, from `first` on. The one behind the largest is 0."""
    return np.array([(first + i) % (MOST_SEED + 1) for i in range(count)], np.int64)
