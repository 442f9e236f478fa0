"""Cuts a window's tokens into segments at its timestamps, as transformers' long form does.

Knows token ids and seconds. Knows no text and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.recogniser_files import TIME_PRECISION, RecogniserFiles

# Frames of features for each position of the encoder, of which each timestamp counts one.
_STRIDE = 2


@dataclass(frozen=True)
class Span:
    """Tokens of a segment, timestamps included, and its times in seconds of the clip."""

    start: float
    end: float
    tokens: list[int]


@dataclass(frozen=True)
class Cut:
    """The segments of a window, and the number of frames after which the next window begins."""

    spans: list[Span]
    frames: int


def cut_at_timestamps(tokens: Sequence[int], first_frame: int, frames: int, files: RecogniserFiles) -> Cut:
    """Cut the tokens of a window of so many `frames`, which begins at `first_frame` of the clip.

    Two timestamps that follow each other end a segment and begin the next. The window ends with the last pair, because
    what follows may be cut off, unless one timestamp stands at the end: then no speech follows.
    """
    offset = first_frame / _STRIDE * TIME_PRECISION
    first = files.first_timestamp
    marks = [token >= first for token in tokens]
    ends_alone = marks[-2:] == [False, True]
    edges = [i + 1 for i in range(len(marks) - 1) if marks[i] and marks[i + 1]]
    if not edges:
        last = _last_time(tokens, first, frames)
        return Cut([Span(offset, offset + last * TIME_PRECISION, list(tokens))], frames)
    if ends_alone:
        edges.append(len(tokens))
    else:
        # The last segment has the timestamp that begins the next one, too.
        edges[-1] += 1
    spans = []
    begin = 0
    for number, edge in enumerate(edges):
        part = list(tokens[begin:edge])
        closing = part[-2] if number == len(edges) - 1 and not ends_alone else part[-1]
        start, end = (offset + (mark - first) * TIME_PRECISION for mark in (part[0], closing))
        spans.append(Span(start, end, part))
        begin = edge
    return Cut(spans, frames if ends_alone else (tokens[begin - 2] - first) * _STRIDE)


def _last_time(tokens: Sequence[int], first: int, frames: int) -> int:
    """The last timestamp of a window without pairs, or the window's end."""
    times = [token - first for token in tokens if token >= first]
    return times[-1] if times and times[-1] else frames // _STRIDE
