"""Draws scenes as tensors, many at a time, on any device.

Every symbol is drawn once by Pillow, with a layer for its main colour and one for what is always the same (a roof, an
eye); a scene places such stamps with varied size, angle, place and colour. Does not know words.
"""

import math
import random
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from demo_model.painter.scenes import (
    COLOURS,
    DIGITS,
    LANDSCAPES,
    PAPER,
    STANDING,
    SYMBOLS,
    Colour,
    Scene,
    Thing,
)

SIDE = 64
# Share of the height above which is sky.
HORIZON = 0.66
# Half of a thing's height, as a share of the picture: in the middle, and elsewhere.
_HALF_IN_MIDDLE = 0.3
_HALF = 0.2
# How far places, sizes (as a share), angles (radians) and channels differ from the plan.
_SHIFT = 0.015
_STRETCH = 0.06
_TURN = 0.05
_COLOUR_SHIFT = 5
_STAMP = 64
_PEN = 256
# Columns of a plan for each thing: index of a stamp, whether it is there, centre x and y, half size, angle, colour.
_OF_THING = 9
Box = tuple[float, float, float, float]


def plan(rng: random.Random, scene: Scene) -> list[float]:
    """Choose what the words leave open. Returns a row for `draw`: two backgrounds, the horizon, and two things."""
    row: list[float] = []
    for colour in behind(scene):
        row += _shifted(rng, colour)
    row.append(HORIZON + rng.uniform(-0.03, 0.03) if scene.background in LANDSCAPES else 2.0)
    for thing in scene.things:
        x, y, half = _position(scene, thing)
        half *= 1 + rng.uniform(-_STRETCH, _STRETCH)
        x, y = x + rng.uniform(-_SHIFT, _SHIFT), y + rng.uniform(-_SHIFT, _SHIFT)
        stamp = float(SYMBOLS.index(thing.symbol))
        row += [stamp, 1.0, x, y, half, rng.uniform(-_TURN, _TURN), *_shifted(rng, COLOURS[thing.colour])]
    return row + [0.0] * (7 + 2 * _OF_THING - len(row))


def draw(plans: Tensor) -> Tensor:
    """Draw the scenes of plans [N, 25]. Returns pixels [N, 3, SIDE, SIDE] between -1 and 1."""
    device, side = plans.device, 2 * SIDE
    centres = (torch.arange(side, device=device) + 0.5) / side
    is_ground = (centres[None] > plans[:, 6:7])[:, None, :, None]
    pixels = torch.where(is_ground, plans[:, 3:6, None, None], plans[:, 0:3, None, None]).expand(-1, 3, side, side)
    stamps = all_stamps().to(device)
    for start in (7, 7 + _OF_THING):
        thing = plans[:, start : start + _OF_THING]
        pixels = _stamped(pixels, stamps[thing[:, 0].long()], thing)
    return functional.avg_pool2d(pixels, 2) * 2 - 1


def behind(scene: Scene) -> tuple[Colour, Colour]:
    """Return the colours above and below the horizon."""
    if scene.background in LANDSCAPES:
        return LANDSCAPES[scene.background]
    colour = COLOURS["white" if scene.background == PAPER else scene.background]
    return colour, colour


def _stamped(pixels: Tensor, stamps: Tensor, thing: Tensor) -> Tensor:
    """Put one stamp on each picture, where there is one."""
    x, y, half, angle = (thing[:, i] for i in range(2, 6))
    half = half.clamp(min=1e-3)
    cosine, sine = angle.cos() / (2 * half), angle.sin() / (2 * half)
    # From the picture's -1 to 1 to the stamp's.
    across, down = 2 * x - 1, 2 * y - 1
    first = torch.stack([cosine, sine, -(cosine * across + sine * down)], 1)
    second = torch.stack([-sine, cosine, sine * across - cosine * down], 1)
    grid = functional.affine_grid(torch.stack([first, second], 1), list(pixels.shape), align_corners=False)
    found = functional.grid_sample(stamps, grid, align_corners=False) * thing[:, 1, None, None, None]
    pixels = pixels + found[:, :1] * (thing[:, 6:9, None, None] - pixels)
    return pixels * (1 - found[:, 1:2]) + found[:, 2:]


def _position(scene: Scene, thing: Thing) -> tuple[float, float, float]:
    """Return the centre and the half size."""
    if scene.background in LANDSCAPES:
        x = 0.5 + 0.29 * (thing.column - 1)
        return (x, HORIZON - 0.02, 0.2) if thing.symbol in STANDING else (x, 0.19, 0.14)
    half = _HALF_IN_MIDDLE if (thing.column, thing.row) == (1, 1) else _HALF
    return 0.5 + 0.25 * (thing.column - 1), 0.5 + 0.25 * (thing.row - 1), half


def _shifted(rng: random.Random, colour: Colour) -> list[float]:
    return [min(255, max(0, channel + rng.randint(-_COLOUR_SHIFT, _COLOUR_SHIFT))) / 255 for channel in colour]


@cache
def all_stamps() -> Tensor:
    """Return [symbols, 5, side, side]: the main colour's layer, then the fixed layer and its colours."""
    return torch.stack([torch.from_numpy(_drawn(symbol)) for symbol in SYMBOLS])


# Width of the pen for digits, beside that of the font.
_STROKE = 5


def _drawn(symbol: str) -> np.ndarray:
    if symbol in DIGITS:
        return _stamp(_digit(symbol), None)
    main, fixed = Image.new("L", (_PEN, _PEN)), Image.new("RGBA", (_PEN, _PEN))
    _DRAWN[symbol](ImageDraw.Draw(main), ImageDraw.Draw(fixed))
    return _stamp(main, fixed)


def _stamp(main: Image.Image, fixed: Image.Image | None) -> np.ndarray:
    size = (_STAMP, _STAMP)
    layer = np.asarray(main.resize(size, Image.Resampling.BOX), np.float32)[None] / 255
    if fixed is None:
        return np.concatenate([layer, np.zeros((4, *size), np.float32)])
    above = np.asarray(fixed, np.float32).transpose(2, 0, 1) / 255
    alpha = above[3:]
    folded = np.concatenate([alpha, above[:3] * alpha]).reshape(4, _STAMP, _PEN // _STAMP, _STAMP, _PEN // _STAMP)
    return np.concatenate([layer, folded.mean((2, 4))])


def _digit(text: str) -> Image.Image:
    font = ImageFont.load_default(200)
    left, top, right, bottom = font.getbbox(text, stroke_width=_STROKE)
    image = Image.new("L", (_PEN, _PEN))
    at = ((_PEN - (right - left)) / 2 - left, (_PEN - (bottom - top)) / 2 - top)
    ImageDraw.Draw(image).text(at, text, fill=255, font=font, stroke_width=_STROKE)
    # As high as the stamp, but no wider.
    grown = image.crop(image.getbbox())
    factor = min((_PEN - 8) / grown.height, (_PEN - 8) / grown.width)
    grown = grown.resize((round(grown.width * factor), round(grown.height * factor)), Image.Resampling.BILINEAR)
    image = Image.new("L", (_PEN, _PEN))
    image.paste(grown, ((_PEN - grown.width) // 2, (_PEN - grown.height) // 2))
    return image


def _at(*corners: tuple[float, float]) -> list[tuple[float, float]]:
    """Corners between -1 and 1 as places of the pen."""
    return [((x + 1) * _PEN / 2, (y + 1) * _PEN / 2) for x, y in corners]


def _box(left: float, top: float, right: float, bottom: float) -> Box:
    (x, y), (z, w) = _at((left, top), (right, bottom))
    return x, y, z, w


Pen = ImageDraw.ImageDraw


def _circle(main: Pen, fixed: Pen) -> None:
    main.ellipse(_box(-0.95, -0.95, 0.95, 0.95), fill=255)


def _square(main: Pen, fixed: Pen) -> None:
    main.rectangle(_box(-0.85, -0.85, 0.85, 0.85), fill=255)


def _triangle(main: Pen, fixed: Pen) -> None:
    main.polygon(_at((0, -0.9), (0.98, 0.85), (-0.98, 0.85)), fill=255)


def _star(main: Pen, fixed: Pen) -> None:
    turns = [math.pi * i / 5 - math.pi / 2 for i in range(10)]
    radii = (0.98, 0.4) * 5
    main.polygon(_at(*((math.cos(t) * r, math.sin(t) * r) for t, r in zip(turns, radii, strict=True))), fill=255)


def _cross(main: Pen, fixed: Pen) -> None:
    main.rectangle(_box(-0.28, -0.95, 0.28, 0.95), fill=255)
    main.rectangle(_box(-0.95, -0.28, 0.95, 0.28), fill=255)


def _ring(main: Pen, fixed: Pen) -> None:
    main.ellipse(_box(-0.95, -0.95, 0.95, 0.95), fill=255)
    main.ellipse(_box(-0.52, -0.52, 0.52, 0.52), fill=0)


def _heart(main: Pen, fixed: Pen) -> None:
    turns = [2 * math.pi * i / 60 for i in range(60)]
    waves = ((13, 1), (-5, 2), (-2, 3), (-1, 4))
    corners = ((math.sin(t) ** 3 * 0.95, -sum(a * math.cos(n * t) for a, n in waves) / 17 * 0.95 - 0.05) for t in turns)
    main.polygon(_at(*corners), fill=255)


def _diamond(main: Pen, fixed: Pen) -> None:
    main.polygon(_at((0, -0.98), (0.66, 0), (0, 0.98), (-0.66, 0)), fill=255)


def _house(main: Pen, fixed: Pen) -> None:
    main.rectangle(_box(-0.7, -0.2, 0.7, 0.9), fill=255)
    fixed.polygon(_at((0, -0.95), (0.95, -0.2), (-0.95, -0.2)), fill=(95, 55, 45, 255))
    fixed.rectangle(_box(-0.2, 0.3, 0.2, 0.9), fill=(60, 40, 30, 255))
    fixed.rectangle(_box(0.34, 0.05, 0.6, 0.35), fill=(255, 240, 170, 255))


def _tree(main: Pen, fixed: Pen) -> None:
    fixed.rectangle(_box(-0.14, 0.2, 0.14, 0.95), fill=(110, 70, 40, 255))
    for x, y in ((-0.35, -0.05), (0.35, -0.05), (0, -0.45), (0, 0)):
        main.ellipse(_box(x - 0.45, y - 0.45, x + 0.45, y + 0.45), fill=255)


def _flower(main: Pen, fixed: Pen) -> None:
    fixed.rectangle(_box(-0.06, 0.25, 0.06, 0.95), fill=(50, 140, 60, 255))
    fixed.ellipse(_box(0.04, 0.5, 0.5, 0.72), fill=(50, 140, 60, 255))
    for i in range(6):
        x, y = 0.42 * math.cos(math.pi * i / 3), 0.42 * math.sin(math.pi * i / 3) - 0.3
        main.ellipse(_box(x - 0.27, y - 0.27, x + 0.27, y + 0.27), fill=255)
    fixed.ellipse(_box(-0.24, -0.54, 0.24, -0.06), fill=(250, 200, 50, 255))


def _boat(main: Pen, fixed: Pen) -> None:
    main.polygon(_at((-0.95, 0.35), (0.95, 0.35), (0.6, 0.9), (-0.6, 0.9)), fill=255)
    fixed.rectangle(_box(-0.05, -0.9, 0.05, 0.35), fill=(90, 60, 40, 255))
    fixed.polygon(_at((0.1, -0.85), (0.8, 0.2), (0.1, 0.2)), fill=(250, 250, 250, 255))
    fixed.polygon(_at((-0.1, -0.6), (-0.1, 0.2), (-0.6, 0.2)), fill=(225, 225, 230, 255))


def _car(main: Pen, fixed: Pen) -> None:
    main.polygon(_at((-0.5, -0.45), (0.35, -0.45), (0.65, 0), (-0.7, 0)), fill=255)
    main.rectangle(_box(-0.95, -0.05, 0.95, 0.45), fill=255)
    fixed.polygon(_at((-0.42, -0.35), (0.28, -0.35), (0.48, -0.02), (-0.55, -0.02)), fill=(190, 225, 245, 255))
    for x in (-0.5, 0.5):
        fixed.ellipse(_box(x - 0.24, 0.22, x + 0.24, 0.7), fill=(30, 30, 30, 255))
        fixed.ellipse(_box(x - 0.09, 0.37, x + 0.09, 0.55), fill=(200, 200, 200, 255))


def _sun(main: Pen, fixed: Pen) -> None:
    main.ellipse(_box(-0.52, -0.52, 0.52, 0.52), fill=255)
    for i in range(8):
        turn = math.pi * i / 4
        for_tip = (math.cos(turn) * 0.98, math.sin(turn) * 0.98)
        sides = [(math.cos(turn + d) * 0.6, math.sin(turn + d) * 0.6) for d in (-0.2, 0.2)]
        main.polygon(_at(for_tip, *sides), fill=255)


def _moon(main: Pen, fixed: Pen) -> None:
    main.ellipse(_box(-0.9, -0.95, 1.0, 0.95), fill=255)
    main.ellipse(_box(-0.25, -0.95, 1.4, 0.7), fill=0)


def _cloud(main: Pen, fixed: Pen) -> None:
    for x, y, r in ((-0.55, 0.15, 0.38), (0, -0.1, 0.5), (0.55, 0.15, 0.38)):
        main.ellipse(_box(x - r, y - r, x + r, y + r), fill=255)
    main.rectangle(_box(-0.55, 0.1, 0.55, 0.53), fill=255)


def _face(main: Pen, fixed: Pen) -> None:
    main.ellipse(_box(-0.95, -0.95, 0.95, 0.95), fill=255)
    dark = (40, 30, 30, 255)
    for x in (-0.35, 0.35):
        fixed.ellipse(_box(x - 0.14, -0.45, x + 0.14, -0.1), fill=dark)
    fixed.chord(_box(-0.55, -0.35, 0.55, 0.65), 15, 165, fill=dark)


_DRAWN = {
    "circle": _circle, "square": _square, "triangle": _triangle, "star": _star, "cross": _cross, "ring": _ring,
    "heart": _heart, "diamond": _diamond, "house": _house, "tree": _tree, "flower": _flower, "boat": _boat,
    "car": _car, "sun": _sun, "moon": _moon, "cloud": _cloud, "face": _face,
}  # fmt: skip
