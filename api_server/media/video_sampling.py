"""Which frames of a video a model sees: for each family the rule of its processor in transformers.

Knows numbers of frames and times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from api_server.media.videos import Clip

_LEAST_FRAMES = 4
_MOST_FRAMES = 768
# Longest video that GLM-4V samples at its own rate, in seconds.
_LONGEST_AT_RATE = 300


@dataclass(frozen=True)
class Ask:
    """The client's wish: a number of frames, or frames for each second."""

    num_frames: int | None = None
    fps: float | None = None


# Returns ascending indices of frames, by the video, the model's settings and the client's wish.
Rule = Callable[[Clip, Mapping[str, Any], Ask], list[int]]


def qwen2(clip: Clip, settings: Mapping[str, Any], ask: Ask) -> list[int]:
    """Evenly from the beginning, in multiples of the frames that become one."""
    pair = int(settings["temporal_patch_size"])
    if ask.num_frames is not None:
        count = float(round(ask.num_frames / pair) * pair)
    else:
        most = math.floor(min(int(settings.get("max_frames", _MOST_FRAMES)), clip.count) / pair) * pair
        count = clip.count / clip.fps * (ask.fps or float(settings["fps"]))
        count = min(max(count, int(settings.get("min_frames", _LEAST_FRAMES))), most, clip.count)
        count = math.floor(count / pair) * pair
    step = clip.count / min(max(count, 1), clip.count)
    # Rounded to single precision first, as torch does: 2.9999999 is 3.
    return [int(i) for i in np.arange(0, clip.count, step).astype(np.float32)]


def qwen3(clip: Clip, settings: Mapping[str, Any], ask: Ask) -> list[int]:
    """Evenly from the first frame to the last."""
    count = ask.num_frames
    if count is None:
        count = int(clip.count / clip.fps * (ask.fps or float(settings["fps"])))
        least = int(settings.get("min_frames", _LEAST_FRAMES))
        count = min(max(count, least), int(settings.get("max_frames", _MOST_FRAMES)), clip.count)
    return [int(i) for i in np.linspace(0, clip.count - 1, count).round()]


def glm4v(clip: Clip, settings: Mapping[str, Any], ask: Ask) -> list[int]:
    """At points of time, each frame once, and an even number of them."""
    last = clip.count - 1
    if ask.num_frames is not None:
        times = np.linspace(0, clip.seconds, ask.num_frames).tolist()
    else:
        rate = ask.fps or float(settings["fps"])
        longest = int(settings.get("max_duration", _LONGEST_AT_RATE))
        if clip.seconds <= longest:
            times = [i / rate for i in range(max(math.floor(clip.seconds * rate), 1))]
            points = [math.ceil(i * clip.fps / rate) for i in range(len(times))]
            return _even(points, last)
        most = int(longest * rate)
        if most >= clip.count:
            return _even(list(range(clip.count)), last)
        times = np.linspace(0, clip.seconds, most).tolist()
    return _even([math.ceil(time * clip.fps) for time in times], last)


def _even(points: list[int], last: int) -> list[int]:
    found = list(dict.fromkeys(min(last, point) for point in points))
    return found + found[-1:] if len(found) % 2 else found


def smolvlm(clip: Clip, settings: Mapping[str, Any], ask: Ask) -> list[int]:
    """Evenly, without the first and the last second of a long video."""
    most = ask.num_frames or int(settings["num_frames"])
    rate = ask.fps or float(settings["fps"])
    count = max(1, most if ask.num_frames is not None else min(round(rate * clip.seconds), most))
    start = 0
    end = clip.count - 1
    if clip.seconds - 2 > most * rate:
        start = int(clip.fps)
        end = min(end, int(clip.count - clip.fps))
        if start >= end:
            start = 0
            end = clip.count - 1
    return [int(i) for i in np.unique(np.linspace(start, end, count, dtype=int))]


def internvl(clip: Clip, settings: Mapping[str, Any], ask: Ask) -> list[int]:
    """The middle frame of each of equal parts."""
    count = _count(clip, settings, ask)
    step = clip.count / count
    return [int(i) for i in np.arange(step / 2, clip.count, step).astype(np.float32)]


def default(clip: Clip, settings: Mapping[str, Any], ask: Ask) -> list[int]:
    """The first frame of each of equal parts."""
    count = _count(clip, settings, ask)
    return [i * clip.count // count for i in range(count)]


def _count(clip: Clip, settings: Mapping[str, Any], ask: Ask) -> int:
    """Number of frames of models that are shown a fixed number; a shorter video has fewer."""
    count = ask.num_frames
    if count is None and (ask.fps or settings.get("fps")):
        count = int(clip.count / clip.fps * (ask.fps or float(settings["fps"])))
    if count is None:
        count = int(settings["num_frames"])
    return min(max(count, 1), clip.count)
