"""Windows of codes: the same for the same codes, however these come."""

from __future__ import annotations

import numpy as np
import pytest

from interfaces import CodecFacts
from shared.speech_windows import Window, Windows, longest

PIECEWISE = CodecFacts(8000, 8, 3, 2)
WHOLE = CodecFacts(8000, 8, -1, -1)


def cut(codes: list[int], width: int, sizes: list[int], codec: CodecFacts = PIECEWISE) -> list[Window]:
    """The windows of codes that come in pieces of these sizes, and of the rest at once."""
    windows = Windows(width, codec)
    found: list[Window] = []
    for size in [*sizes, len(codes)]:
        windows.add(codes[:size])
        codes = codes[size:]
        found += windows.ready()
    return [*found, *windows.rest()]


def shown(windows: list[Window]) -> list[tuple[list[int], int, int, int]]:
    return [(window.codes.tolist(), window.first_frame, window.left, window.right) for window in windows]


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 8, 30, 57, 58, 81, 140])
def test_windows_follow_from_the_number_of_codes(frames: int) -> None:
    codes = list(range(2 * frames))
    at_once = cut(codes, 2, [])
    assert shown(at_once) == shown(cut(codes, 2, [1] * len(codes)))
    assert shown(at_once) == shown(cut(codes, 2, [7, 30, 2]))
    inner = [window.codes.reshape(-1, 2)[window.left : len(window.codes) // 2 - window.right] for window in at_once]
    assert np.concatenate(inner).reshape(-1).tolist() == codes
    for window in at_once:
        first = window.first_frame + window.left
        last = window.first_frame + len(window.codes) // 2 - window.right
        assert window.left == min(PIECEWISE.left, first)
        assert window.right == min(PIECEWISE.right, frames - last)


def test_the_first_window_comes_with_its_surroundings() -> None:
    windows = Windows(1, PIECEWISE)
    windows.add([0, 1, 2])
    assert not list(windows.ready())
    windows.add([3])
    (first,) = windows.ready()
    assert (first.codes.tolist(), first.left, first.right) == ([0, 1, 2, 3], 0, 2)


@pytest.mark.parametrize(
    ("codec", "frames"),
    [
        (CodecFacts(24000, 320, 11, 11), 88),  # four times what surrounds them
        (CodecFacts(24000, 320, 40, 40), 112),  # a second and a half
        (CodecFacts(24000, 2048, 5, 5), 25),  # which is two seconds
        (WHOLE, 25),
    ],
)
def test_later_windows_are_long_beside_their_surroundings(codec: CodecFacts, frames: int) -> None:
    assert longest(codec) == frames
    if codec.is_whole:
        return
    windows = Windows(1, codec)
    windows.add(list(range(1000)))
    lengths = [len(window.codes) - window.left - window.right for window in windows.ready()]
    assert lengths[:4] == [2, 4, 8, 16]
    assert set(lengths[6:]) == {frames}


def test_an_incomplete_frame_of_a_part_is_dropped() -> None:
    windows = Windows(3, PIECEWISE)
    windows.add([0, 1, 2, 3, 4])
    windows.end_part()
    windows.add([10, 11, 12])
    (only,) = windows.rest()
    assert only.codes.tolist() == [0, 1, 2, 10, 11, 12]


def test_codes_before_the_sound_only_surround_it() -> None:
    windows = Windows(1, PIECEWISE, [7, 8, 9, 10, 11])
    windows.add([0, 1])
    assert shown(list(windows.rest())) == [([9, 10, 11, 0, 1], 2, 3, 0)]


def test_a_codec_that_needs_all_codes_gets_each_part() -> None:
    windows = Windows(1, WHOLE)
    windows.add(list(range(40)))
    assert not list(windows.ready())
    assert shown(list(windows.rest())) == [(list(range(40)), 0, 0, 0)]
    windows.add([5, 6])
    assert shown(list(windows.rest())) == [([5, 6], 40, 0, 0)]
    assert not list(windows.rest())
