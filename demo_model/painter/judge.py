"""Says what is on a picture: the symbol, its colour, its place and the background, for one thing before a colour.

It has never seen the painter: it compares the silhouette of what differs from the border with those of drawings, as the
nearest of them, and colours with their names. Knows pixels; does not know models.
"""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from demo_model.painter.drawing import SIDE, draw, plan
from demo_model.painter.scenes import COLOURS, LANDSCAPES, SYMBOLS, THINGS, Scene, Thing, is_seen

Pixels = NDArray[np.float32]
# Pixels of a side of the silhouettes that are compared, and drawings of each symbol.
_SILHOUETTE = 20
_EXAMPLES = 24
# How far from the background a pixel of a thing is, as a share of the range, summed over the channels.
_DIFFERS = 0.35
# Weight of the proportions of a silhouette beside its pixels.
_PROPORTIONS = 60.0


@dataclass(frozen=True)
class Seen:
    """What is on a picture. `column` and `row` are 0, 1 or 2."""

    symbol: str
    colour: str
    background: str
    column: int
    row: int


def see(pixels: Pixels) -> Seen | None:
    """Look at a picture, f32[SIDE, SIDE, 3] between 0 and 1. None when there is nothing on it."""
    behind = _behind(pixels)
    found = _found(pixels, behind)
    if found is None:
        return None
    vector, rows, columns = found
    known, symbols = _examples()
    symbol = symbols[int(((known - vector) ** 2).sum(1).argmin())]
    cut = pixels[rows, columns].reshape(-1, 3)
    far = np.abs(cut - behind).sum(1)
    # The edges of a thing are mixed with the background, but some things have darker parts.
    inside = cut[far > (_DIFFERS if symbol in THINGS else 0.75 * far.max())]
    return Seen(symbol, _colour_of(inside), _name(behind), _third(columns), _third(rows))


def _behind(pixels: Pixels) -> Pixels:
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    middle: Pixels = np.median(border, 0)
    return middle


def _found(pixels: Pixels, behind: Pixels) -> tuple[Pixels, slice, slice] | None:
    """Return what stands for a silhouette, and where it is."""
    differs = np.abs(pixels - behind).sum(-1) > _DIFFERS
    if differs.sum() < 12:
        return None
    rows, columns = (_extent(differs.sum(axis)) for axis in (1, 0))
    cut = torch.from_numpy(np.ascontiguousarray(pixels[rows, columns] - behind)).permute(2, 0, 1)[None]
    small = torch.nn.functional.interpolate(cut, (_SILHOUETTE, _SILHOUETTE), mode="area")[0].abs().sum(0)
    height, width = rows.stop - rows.start, columns.stop - columns.start
    proportions = np.array([height, width], np.float32) / max(height, width)
    silhouette = (small / small.quantile(0.95).clamp(min=1e-3)).clamp(max=1).numpy().ravel()
    return np.concatenate([silhouette, proportions * np.sqrt(_PROPORTIONS)]), rows, columns


def _extent(counts: NDArray[np.int64]) -> slice:
    """Return where a row or a column has more than a stray pixel."""
    there = np.flatnonzero(counts > 1)
    return slice(int(there[0]), int(there[-1]) + 1) if len(there) else slice(0, len(counts))


def _colour_of(inside: Pixels) -> str:
    """Return the name that most pixels have."""
    names, counts = np.unique([_name(pixel) for pixel in inside], return_counts=True)
    return str(names[counts.argmax()])


def _name(colour: Pixels) -> str:
    return min(COLOURS, key=lambda name: float(np.square(np.array(COLOURS[name]) / 255 - colour).sum()))


def _third(extent: slice) -> int:
    """Return the third of the picture in which the middle of something is; things stand at a quarter of it."""
    middle = (extent.start + extent.stop) / 2 / SIDE
    return 0 if middle < 0.375 else 2 if middle > 0.625 else 1


@cache
def _examples() -> tuple[Pixels, tuple[str, ...]]:
    """Return the silhouettes of drawings, and what they are of."""
    rng = random.Random(0)
    symbols = [symbol for symbol in SYMBOLS for _ in range(_EXAMPLES)]
    scenes = []
    for i, symbol in enumerate(symbols):
        usual = THINGS.get(symbol) if i % 2 else None
        background = rng.choice(("white", "black", "blue"))
        colour = usual or rng.choice(tuple(COLOURS))
        while not is_seen(colour, background):
            background = rng.choice(tuple(COLOURS))
        scenes.append(Scene((Thing(symbol, colour, row=rng.choice((0, 1))),), background))
    drawn = ((draw(torch.tensor([plan(rng, scene) for scene in scenes])) + 1) / 2).permute(0, 2, 3, 1).numpy()
    made = [_found(pixels, _behind(pixels)) for pixels in drawn]
    return np.stack([each[0] for each in made if each]), tuple(s for s, each in zip(symbols, made, strict=True) if each)


def is_judged(scene: Scene) -> bool:
    """Whether a scene is one that can be seen: a thing before a colour."""
    return len(scene.things) == 1 and scene.background not in LANDSCAPES
