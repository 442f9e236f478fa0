"""Turns the bytes of an image file into an upright picture of three colours. Runs in the media process only.

Knows Pillow, and what of it must not meet the bytes of strangers. Knows no model.
"""

from __future__ import annotations

import contextlib
import io

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageChops, ImageOps, UnidentifiedImageError

# The formats that are opened. Pillow knows many more, some of which run other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Most pixels of one image: decoded, they take 100 MB.
MOST_PIXELS = 33_000_000
# Most pixels of all images of one request.
MOST_PIXELS_TOGETHER = 100_000_000

_WHITE = (255, 255, 255)
# Modes with an alpha channel.
_TRANSPARENT = ("RGBA", "LA", "PA", "La", "RGBa")
# Depths of more than 8 bits for each pixel, as Pillow opens them.
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
# EXIF's orientations of images that lie on a side.
_LYING = (5, 6, 7, 8)
_HIGHEST_OF_16_BITS = 65_535
_STEPS_TO_8_BITS = 257


class ImageRefused(ValueError):
    """An image that cannot be used. The message is the end of a sentence about it."""


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height from the file's header. Raises ImageRefused."""
    with opened(data) as image:
        return image.size


def upright_size_of(data: bytes) -> tuple[int, int]:
    """Width and height that `decoded` gives, from the file's header. Raises ImageRefused."""
    with opened(data) as image:
        width, height = image.size
        orientation = None
        with contextlib.suppress(Exception):  # malformed EXIF data are ignored
            orientation = image.getexif().get(ExifTags.Base.Orientation)
        return (height, width) if orientation in _LYING else (width, height)


def decoded(data: bytes) -> Image.Image:
    """The picture, upright and in RGB; the first one of an animation. Raises ImageRefused."""
    with opened(data) as image:
        try:
            image.load()
            return flat(_upright(image))
        except MemoryError:
            raise
        except Exception as error:  # decoders meet arbitrary bytes and raise whatever comes
            raise ImageRefused(f"is damaged or cut off ({reason(error)}): send the whole file") from None


def opened(data: bytes) -> Image.Image:
    """The image with its header read, and no pixel. Raises ImageRefused."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageRefused(f"is no image that can be read here: send {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ImageRefused(f"has more than {MOST_PIXELS} pixels: send a smaller one") from None
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise ImageRefused(f"is damaged ({reason(error)}): send the whole file") from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ImageRefused(f"has {width} x {height} pixels; at most {MOST_PIXELS} are possible: send a smaller one")
    if width < 1 or height < 1:
        raise ImageRefused("has no pixels")
    return image


def resized(image: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The pixels of a picture in a width and height, u8[height, width, channels], as diffusers resizes it."""
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS))


def mask_of(data: bytes, size: tuple[int, int], wanted: tuple[int, int]) -> NDArray[np.uint8]:
    """A mask for an image of this size, resized, u8[height, width]: 255 where the image is painted anew.

    That is where the mask is transparent; where it has no transparency, where it is white. Raises ImageRefused.
    """
    with opened(data) as image:
        try:
            image.load()
            upright = _upright(image)
            if upright.mode in _DEEP:
                upright = _of_8_bits(upright)
            if upright.mode in _TRANSPARENT or "transparency" in upright.info:
                shade = ImageChops.invert(upright.convert("RGBA").getchannel("A"))
            else:
                shade = upright.convert("L")
        except MemoryError:
            raise
        except Exception as error:  # as in `decoded`
            raise ImageRefused(f"is damaged or cut off ({reason(error)}): send the whole file") from None
    if shade.size != size:
        raise ImageRefused(
            f"has {shade.width} x {shade.height} pixels, and the image {size[0]} x {size[1]}: send one of the same size"
        )
    return np.where(resized(shade, wanted) > _WHITE[0] // 2, np.uint8(_WHITE[0]), np.uint8(0))


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data say. Malformed EXIF data are ignored."""
    turned = None
    with contextlib.suppress(Exception):
        turned = ImageOps.exif_transpose(image)
    return image if turned is None else turned


def flat(image: Image.Image) -> Image.Image:
    """The image in RGB. What is transparent becomes white, and 16 bits become 8."""
    if image.mode in _DEEP:
        image = _of_8_bits(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        whole = image.convert("RGBA")
        under = Image.new("RGBA", whole.size, (*_WHITE, 255))
        return Image.alpha_composite(under, whole).convert("RGB")
    return image.convert("RGB")


def _of_8_bits(image: Image.Image) -> Image.Image:
    deep = np.clip(np.asarray(image).astype(np.int64), 0, _HIGHEST_OF_16_BITS)
    return Image.fromarray((deep // _STEPS_TO_8_BITS).astype(np.uint8))


def reason(error: Exception) -> str:
    """The first line of a decoder's complaint."""
    return (str(error) or type(error).__name__).splitlines()[0][:100]
