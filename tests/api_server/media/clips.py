"""Small videos for tests, in several forms."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def shade(index: int) -> int:
    """The shade of grey of a frame's right half."""
    return index * 8 % 256


def frame(index: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """A frame whose left half is red, and whose right half tells its number."""
    pixels = np.full((size[1], size[0], 3), shade(index), np.uint8)
    pixels[:, : size[0] // 2] = (255, 0, 0)
    return pixels


def number(image: Image.Image) -> int:
    """The number of a frame, read from its pixels."""
    pixels = np.asarray(image)
    return round(float(pixels[:, 3 * pixels.shape[1] // 4 :, 1].mean()) / 8)


def file(
    count: int = 20, fps: int = 10, size: tuple[int, int] = (64, 48), codec: str = "libx264", form: str = "mp4"
) -> bytes:
    """A video file. Needs the package av."""
    import av

    made: Any = av
    out = io.BytesIO()
    with made.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for i in range(count):
            container.mux(stream.encode(made.VideoFrame.from_ndarray(frame(i, size), format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def animation(form: str = "GIF", count: int = 6, milliseconds: int = 100, size: tuple[int, int] = (64, 48)) -> bytes:
    """An animated GIF, WebP or PNG."""
    images = [Image.fromarray(frame(i, size)) for i in range(count)]
    out = io.BytesIO()
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    images[0].save(out, form, save_all=True, append_images=images[1:], duration=milliseconds, loop=0, **options)
    return out.getvalue()


def still(index: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """A frame as an image file."""
    out = io.BytesIO()
    Image.fromarray(frame(index, size)).save(out, "PNG")
    return out.getvalue()
