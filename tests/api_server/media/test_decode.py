"""Files of images: each rule of decoding, by files that break the naive way, and thousands of hostile ones."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageSequence, features

from api_server.media.decode import (
    FORMATS,
    MOST_PIXELS,
    MOST_PIXELS_TOGETHER,
    ImageRefused,
    decoded,
    size_of,
    upright_size_of,
)
from api_server.media.media_process import outcome

# Pillow warns of metadata that it cannot read.
pytestmark = pytest.mark.filterwarnings("ignore")

RED = (255, 0, 0)
BLUE = (0, 0, 255)
WHITE = (255, 255, 255)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def noise(size: tuple[int, int] = (24, 16), seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_header(width: int, height: int) -> bytes:
    """A small file that announces many pixels, and has them: rows of zeros compress well."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(bytes(1 + width // 8 + (width % 8 > 0))) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_read_whatever_it_is_called(form: str) -> None:
    image = Image.new("RGB", (40, 20), RED)
    found = decoded(saved(image, form))
    assert found.mode == "RGB"
    assert found.size == (40, 20)
    assert np.abs(np.asarray(found).astype(int) - RED).max() <= 3  # some are lossy


@pytest.mark.parametrize("form", ["EPS", "PPM", "ICO", "TGA", "PDF", "JPEG2000", "SGI", "PCX"])
def test_other_formats_of_pillow_are_refused(form: str) -> None:
    with pytest.raises(ImageRefused, match="no image that can be read here: send PNG, JPEG"):
        decoded(saved(Image.new("RGB", (32, 32), RED), form))


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = png_of_header(9400, 9600)
    assert len(bomb) < 120_000
    began = time.process_time()
    with pytest.raises(ImageRefused, match=f"9400 x 9600 pixels; at most {MOST_PIXELS} are possible"):
        decoded(bomb)
    with pytest.raises(ImageRefused, match="more than"):
        size_of(png_of_header(20_000, 20_000))
    assert time.process_time() - began < 5


def test_bombs_of_one_request_are_counted_together() -> None:
    data = png_of_header(5500, 5500)
    job: dict[str, Any] = {"measure": [data] * 3}
    assert outcome(None, job) == {"counts": [5500 * 5500] * 3}  # type: ignore[arg-type]
    answer = outcome(None, {"measure": [data] * 4})  # type: ignore[arg-type, typeddict-item]
    assert answer["index"] == 3
    assert f"at most {MOST_PIXELS_TOGETHER} are possible in one request" in answer["error"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(orientation: int) -> None:
    image = noise((30, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decoded(saved(image, "PNG", exif=exif))
    assert upright_size_of(saved(image, "JPEG", exif=exif)) == found.size
    pixels = np.asarray(image)
    turns: dict[int, Callable[[Any], Any]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a),
    }
    assert (np.asarray(found) == turns[orientation](pixels)).all()


def test_malformed_exif_is_ignored() -> None:
    image = noise()
    found = decoded(saved(image, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + bytes(range(40))))
    assert (np.asarray(found) == np.asarray(image)).all()


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_what_is_transparent_becomes_white(form: str) -> None:
    image = Image.new("RGBA", (20, 10), (*RED, 0))
    image.paste((*BLUE, 255), (0, 0, 10, 10))
    found = decoded(saved(image, form, **({"lossless": True, "exact": True} if form == "WEBP" else {})))
    assert found.getpixel((15, 5)) == WHITE
    assert found.getpixel((5, 5)) == BLUE


def test_half_transparent_colours_are_mixed_with_white() -> None:
    found = decoded(saved(Image.new("RGBA", (4, 4), (*RED, 128))))
    assert np.abs(np.subtract(found.getpixel((1, 1)), (255, 127, 127))).max() <= 1  # type: ignore[arg-type]


def test_grey_with_alpha() -> None:
    image = Image.new("LA", (4, 4), (0, 0))
    assert decoded(saved(image)).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_palette_with_a_transparent_colour(form: str) -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([*RED, *BLUE])
    image.paste(1, (0, 0, 4, 8))
    found = decoded(saved(image, form, transparency=0))
    assert found.getpixel((6, 4)) == WHITE
    assert found.getpixel((1, 4)) == BLUE


def test_a_transparent_colour_of_rgb() -> None:
    image = Image.new("RGB", (8, 8), RED)
    image.paste(BLUE, (0, 0, 4, 8))
    found = decoded(saved(image, "PNG", transparency=RED))
    assert found.getpixel((6, 4)) == WHITE
    assert found.getpixel((1, 4)) == BLUE


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_become_eight(form: str) -> None:
    deep = np.linspace(0, 65_535, 256, dtype=np.uint16).reshape(16, 16)
    found = np.asarray(decoded(saved(Image.fromarray(deep), form)))
    assert (found[..., 0] == deep // 257).all()
    assert (found[..., 0] == found[..., 1]).all()
    assert found.min() == 0
    assert found.max() == 255


def test_cmyk() -> None:
    found = decoded(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(np.subtract(found.getpixel((3, 3)), RED)).max() <= 3  # type: ignore[arg-type]


def test_one_bit() -> None:
    image = Image.new("1", (9, 9), 1)
    image.putpixel((4, 4), 0)
    found = decoded(saved(image))
    assert (found.getpixel((0, 0)), found.getpixel((4, 4))) == (WHITE, (0, 0, 0))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_picture_is_seen(form: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE, WHITE)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == 3
    assert decoded(data).getpixel((8, 8)) == RED


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_file_that_is_cut_off(form: str) -> None:
    data = saved(noise((120, 90)), form)
    with pytest.raises(ImageRefused, match=r"damaged|no image"):
        decoded(data[: len(data) // 2])
    with pytest.raises(ImageRefused, match=r"damaged|no image"):
        decoded(data[:10])


def test_nothing_and_a_text() -> None:
    for data in (b"", b"\0" * 100, b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0 EPSF-3.0"):
        with pytest.raises(ImageRefused, match="no image that can be read here"):
            decoded(data)


def test_a_thin_image() -> None:
    assert decoded(saved(Image.new("RGB", (1, 5000), RED))).size == (1, 5000)


def test_a_profile_of_colours_changes_nothing() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = noise()
    assert (np.asarray(decoded(saved(image, "PNG", icc_profile=profile))) == np.asarray(image)).all()


def seeds() -> list[bytes]:
    """Small files of every kind that the rules above speak of."""
    image = noise((33, 21))
    exif = Image.Exif()
    exif[0x0112] = 6
    rgba = image.convert("RGBA")
    rgba.putalpha(100)
    several = {"save_all": True, "append_images": [noise((33, 21), seed) for seed in (1, 2)]}
    found = [saved(image, form) for form in FORMATS]
    found += [saved(image, "JPEG", exif=exif), saved(image, "JPEG", progressive=True), saved(rgba), saved(rgba, "WEBP")]
    found += [
        saved(image.convert("P"), "GIF", **several),
        saved(image, "WEBP", **several),
        saved(image, "PNG", **several),
    ]
    found += [saved(image, "TIFF", compression=form) for form in ("tiff_lzw", "tiff_adobe_deflate", "packbits")]
    found += [saved(image.convert("CMYK"), "JPEG"), saved(image.convert("1")), saved(image.convert("P"), "BMP")]
    return [*found, saved(Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20)))]


def mutated(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 30))):
        place = draw.randrange(len(found)) if draw.random() < 0.6 else draw.randrange(min(64, len(found)))
        match draw.randrange(6):
            case 0:
                found[place] = draw.randrange(256)
            case 1:
                found[place] ^= 1 << draw.randrange(8)
            case 2:
                found[place : place + draw.choice((2, 4))] = draw.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))
            case 3:
                del found[place : place + draw.randrange(1, 40)]
            case 4:
                found[place:place] = found[: draw.randrange(1, 60)]
            case 5:
                del found[max(1, place) :]
        if not found:
            return b"\0"
    return bytes(found)


def with_right_sums(data: bytes) -> bytes:
    """A PNG whose check sums fit its damaged chunks, so that the decoder reads them."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out = data[:8]
    place = 8
    while place + 8 <= len(data):
        length = min(int.from_bytes(data[place : place + 4], "big"), len(data) - place - 8)
        out += png_chunk(data[place + 4 : place + 8], data[place + 8 : place + 8 + length])
        place += 12 + length
    return out


def hostile(count: int) -> Iterator[bytes]:
    draw = random.Random(47)
    files = seeds()
    for _ in range(count):
        data = mutated(draw.choice(files), draw)
        yield with_right_sums(data) if draw.random() < 0.5 else data


@pytest.mark.slow
def test_ten_thousand_hostile_files_give_a_picture_or_a_reason() -> None:
    outcomes = {"picture": 0, "reason": 0}
    began = time.process_time()
    for data in hostile(10_000):
        try:
            found = decoded(data)
        except (ImageRefused, MemoryError):
            outcomes["reason"] += 1
        else:
            outcomes["picture"] += 1
            assert found.mode == "RGB"
            assert found.width * found.height <= MOST_PIXELS
    assert min(outcomes.values()) > 1000, outcomes
    assert time.process_time() - began < 120, "a file takes seconds to read"


def test_this_pillow_reads_the_formats() -> None:
    for codec in ("jpg", "webp", "zlib", "libtiff"):
        assert features.check(codec) or features.check_module(codec), codec
