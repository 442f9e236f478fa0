"""Line charts as SVG: text, so that a page of them needs no script, no font and no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 640
HEIGHT = 320
_LEFT = 64
_RIGHT = 16
_TOP = 16
_BOTTOM = 44
# Lines that each axis may have.
_TICKS = 6
# Colours that people with any kind of colour vision tell apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")


@dataclass(frozen=True)
class Line:
    """Points in the order in which they are joined, each with what is shown of it under the pointer."""

    name: str
    points: Sequence[tuple[float, float]]
    notes: Sequence[str] = ()
    dots: bool = True


def chart(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """A figure with axes from zero and a legend. Without points it says so."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>No values.</p></figure>"
    right = axis_end(max(x for line in drawn for x, _ in line.points))
    top = axis_end(max(y for line in drawn for _, y in line.points))
    parts = [_grid(right, top, across, up)]
    parts += [_drawn(line, COLOURS[i % len(COLOURS)], right, top) for i, line in enumerate(drawn)]
    body = "".join(parts)
    keys = "".join(
        f'<li><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(line.name)}</li>'
        for i, line in enumerate(drawn)
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
        f"<ul>{keys}</ul></figure>"
    )


def axis_end(most: float) -> float:
    """The end of an axis: a round number of steps that reaches the largest value."""
    step = step_of(most)
    return step * max(1, math.ceil(most / step - 1e-9))


def step_of(most: float) -> float:
    """The distance between an axis' lines: 1, 2 or 5 times a power of ten."""
    if not most > 0:
        return 1.0
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _grid(right: float, top: float, across: str, up: str) -> str:
    parts = []
    for value in _lines_of(right):
        x = _x(value, right)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for value in _lines_of(top):
        y = _y(value, top)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>'
    )
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(up)}</text>'
    )
    return f'<g class="grid">{"".join(parts)}</g>'


def _lines_of(end: float) -> list[float]:
    step = step_of(end)
    return [round(step * i, 12) for i in range(round(end / step) + 1)]


def _drawn(line: Line, colour: str, right: float, top: float) -> str:
    places = [(_x(x, right), _y(y, top)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    notes = line.notes or [f"{line.name}: {x:g}, {y:g}" for x, y in line.points]
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(note)}</title></circle>'
        for (x, y), note in zip(places, notes, strict=True)
    ]
    shown = "".join(dots) if line.dots else ""
    return f'<g stroke="{colour}" fill="{colour}"><polyline fill="none" points="{path}"/>{shown}</g>'


def _x(value: float, right: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / right


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top
