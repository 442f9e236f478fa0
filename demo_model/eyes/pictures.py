"""Draws the pictures that the embedded model can read: digits, words, shapes, plain colours and bar charts.

Knows how each kind looks, in varied sizes, places, forms, colours and noise. Does not know what is asked about it.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (215, 40, 40),
    "green": (45, 160, 60),
    "blue": (45, 80, 215),
    "yellow": (240, 215, 40),
    "orange": (245, 140, 25),
    "purple": (140, 55, 170),
    "black": (18, 18, 18),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
MOST_BARS = 4
DIGITS = "0123456789"
# Each is one token of the embedded model's vocabulary.
WORDS = (
    "cat", "dog", "fox", "bear", "lion", "fish", "bird", "sun", "moon", "star", "tree", "road", "rain", "snow", "book",
    "boat", "ball", "cake", "car", "city", "desk", "door", "farm", "fire",
)  # fmt: skip
# Sides of drawn pictures; a processor makes them the tower's size.
SIDES = (64, 96, 128)
# How far a named colour may differ, in each channel.
COLOUR_SHIFT = 14
MOST_NOISE = 10.0
# How far from the middle a text may be, as a share of the picture.
MOST_SHIFT = 0.04


@dataclass(frozen=True)
class Picture:
    """A picture and the facts that are asked about it."""

    kind: str
    image: Image.Image
    # The digit, the word or the shape; the number of a chart's bars; empty for a plain colour.
    subject: str
    # A chart has one for each bar, from the left.
    colours: tuple[str, ...]
    # The colour of the highest bar.
    highest: str = ""

    @property
    def colour(self) -> str:
        """The colour that is asked for: that of the highest bar, or of all there is."""
        return self.highest or self.colours[0]


def draw(rng: random.Random, kind: str = "") -> Picture:
    """Draw a picture of a kind, or of any."""
    made = KINDS[kind or rng.choice(tuple(KINDS))](rng)
    return replace(made, image=_noisy(made.image, rng))


def _digit(rng: random.Random) -> Picture:
    digit = rng.choice(DIGITS)
    side = rng.choice(SIDES)
    image, colour = _paper(rng, side)
    _write(rng, image, digit, COLOURS[colour], 0.9, rng.uniform(0.6, 0.85))
    return Picture("digit", image, digit, (colour,))


def _word(rng: random.Random) -> Picture:
    word = rng.choice(WORDS)
    side = rng.choice(SIDES)
    image, colour = _paper(rng, side)
    _write(rng, image, word, COLOURS[colour], rng.uniform(0.8, 0.95), 0.6)
    return Picture("word", image, word, (colour,))


def _shape(rng: random.Random) -> Picture:
    shape = rng.choice(SHAPES)
    side = rng.choice(SIDES)
    image, colour = _paper(rng, side)
    radius = side * rng.uniform(0.28, 0.42)
    x, y = (rng.uniform(radius + 1, side - radius - 1) for _ in range(2))
    fill = _shifted(rng, COLOURS[colour])
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        pen.polygon([(x + radius * u, y + radius * v) for u, v in _corners(shape)], fill=fill)
    return Picture("shape", image, shape, (colour,))


def _plain(rng: random.Random) -> Picture:
    colour = rng.choice(tuple(COLOURS))
    side = rng.choice(SIDES)
    return Picture("colour", Image.new("RGB", (side, side), _shifted(rng, COLOURS[colour])), "", (colour,))


def _chart(rng: random.Random) -> Picture:
    """Bars of different colours, of which one is clearly the highest."""
    count = rng.randint(2, MOST_BARS)
    side = rng.choice(SIDES)
    image = Image.new("RGB", (side, side), _light(rng))
    colours = rng.sample([name for name in COLOURS if name != "white"], count)
    highest = rng.randrange(count)
    heights = [rng.uniform(0.12, 0.58) for _ in range(count)]
    heights[highest] = rng.uniform(0.7, 0.9)
    left = side * rng.uniform(0.04, 0.1)
    floor = side * rng.uniform(0.92, 0.97)
    pitch = (side * 0.95 - left) / count
    pen = ImageDraw.Draw(image)
    for i, (height, colour) in enumerate(zip(heights, colours, strict=True)):
        x = left + (i + 0.12) * pitch
        pen.rectangle((x, floor - height * side, x + 0.7 * pitch, floor), fill=_shifted(rng, COLOURS[colour]))
    return Picture("chart", image, str(count), tuple(colours), colours[highest])


KINDS: dict[str, Callable[[random.Random], Picture]] = {
    "digit": _digit,
    "word": _word,
    "shape": _shape,
    "colour": _plain,
    "chart": _chart,
}


def _corners(shape: str) -> list[tuple[float, float]]:
    """Corners within a circle of radius 1."""
    if shape == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if shape == "triangle":
        return [(0.0, -0.95), (0.95, 0.8), (-0.95, 0.8)]
    if shape == "cross":
        arm = [(-0.3, -0.95), (0.3, -0.95), (0.3, -0.3)]
        return [turned for quarter in range(4) for turned in _turned(arm, quarter)]
    turns = [math.pi * i / 5 - math.pi / 2 for i in range(10)]
    return [(math.cos(turn) * r, math.sin(turn) * r) for turn, r in zip(turns, (1.0, 0.42) * 5, strict=True)]


def _turned(corners: list[tuple[float, float]], quarters: int) -> list[tuple[float, float]]:
    for _ in range(quarters):
        corners = [(-y, x) for x, y in corners]
    return corners


def _paper(rng: random.Random, side: int) -> tuple[Image.Image, str]:
    """An empty picture, and the name of a colour that can be seen on it."""
    colour = rng.choice(tuple(COLOURS))
    if colour == "white" or (colour != "black" and rng.random() < 0.2):
        paper = _tint(rng, 0, 45)
    else:
        paper = (255, 255, 255) if colour == "yellow" else _light(rng)
    return Image.new("RGB", (side, side), paper), colour


def _light(rng: random.Random) -> Colour:
    return _tint(rng, 215, 255)


def _tint(rng: random.Random, least: int, most: int) -> Colour:
    return rng.randint(least, most), rng.randint(least, most), rng.randint(least, most)


def _shifted(rng: random.Random, colour: Colour) -> Colour:
    red, green, blue = (min(255, max(0, c + rng.randint(-COLOUR_SHIFT, COLOUR_SHIFT))) for c in colour)
    return red, green, blue


def _write(
    rng: random.Random, image: Image.Image, text: str, colour: Colour, most_width: float, most_height: float
) -> None:
    """Write a text about the middle, as large as it fits shares of the picture, perhaps bold, slanted or turned."""
    stroke = rng.choice((0, 0, 1, 2, 3))
    left, top, right, bottom = _font().getbbox(text, stroke_width=stroke)
    ink = Image.new("L", (math.ceil(right - left) + 4, math.ceil(bottom - top) + 4))
    ImageDraw.Draw(ink).text((2 - left, 2 - top), text, fill=255, font=_font(), stroke_width=stroke)
    slant = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.2)))
    if slant:
        extra = int(ink.height * slant)
        shear = (1, slant, -extra, 0, 1, 0)
        ink = ink.transform((ink.width + extra, ink.height), Image.Transform.AFFINE, shear, Image.Resampling.BILINEAR)
    ink = ink.rotate(rng.uniform(-3, 3), Image.Resampling.BILINEAR, expand=True)
    side = image.width
    scale = min(side * most_width / ink.width, side * most_height / ink.height)
    ink = ink.resize((max(1, round(ink.width * scale)), max(1, round(ink.height * scale))), Image.Resampling.BILINEAR)
    x, y = (round((side - size) / 2 + side * rng.uniform(-MOST_SHIFT, MOST_SHIFT)) for size in ink.size)
    image.paste(_shifted(rng, colour), (x, y), ink)


@cache
def _font() -> ImageFont.FreeTypeFont:
    """Pillow's own font, which is on every machine."""
    font = ImageFont.load_default(64)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise TypeError("this Pillow was built without FreeType, which the pictures' texts are drawn with")
    return font


@cache
def _noise() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(1 << 20, np.float32)


def _noisy(image: Image.Image, rng: random.Random) -> Image.Image:
    strength = rng.choice((0.0, rng.uniform(0, MOST_NOISE)))
    if not strength:
        return image
    pixels = np.asarray(image, np.float32)
    start = rng.randrange(_noise().size - pixels.size)
    noise = _noise()[start : start + pixels.size].reshape(pixels.shape)
    return Image.fromarray(np.clip(pixels + strength * noise, 0, 255).astype(np.uint8))
