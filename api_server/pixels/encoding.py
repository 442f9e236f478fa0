"""Pixels as image files. Knows Pillow; knows neither requests nor dialects."""

from __future__ import annotations

import io
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Format = Literal["png", "jpeg", "webp"]
FORMATS: tuple[Format, ...] = get_args(Format)


def encoded(pixels: NDArray[np.float32], kind: Format, quality: int) -> bytes:
    """The file of pixels f32[height, width * 3] between 0 and 1. `quality`, 0 to 100, is for jpeg and webp."""
    from PIL import Image

    height, width = pixels.shape[0], pixels.shape[1] // 3
    # As diffusers rounds them.
    rounded = (pixels * 255).round().astype(np.uint8).reshape(height, width, 3)
    file = io.BytesIO()
    options: dict[str, Any] = {} if kind == "png" else {"quality": quality}
    Image.fromarray(rounded).save(file, format=kind, **options)
    return file.getvalue()
