"""Chooses the frames of a video that a model sees, and makes its arrays of them. Runs in the media process only.

transformers' classes for videos need torchvision, so their rules are written here once more: which frames, which size,
which order of patches. The text that stands for the video is made by transformers' processor. Frames are resized and
normalized as the model's images are. Knows no file format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.media.decode import ImageRefused
from api_server.media.video_sampling import Ask, Rule, default, glm4v, internvl, qwen2, qwen3, smolvlm
from api_server.media.videos import MOST_FRAMES, Clip, Source

_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_BICUBIC = 3
_LANCZOS = 1
_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "resample": _BICUBIC, "fps": 2.0}
# Highest quotient of the sides of a frame in models that keep its shape.
_LONGEST_SHAPE = 200


@dataclass(frozen=True)
class VideoArrays:
    """One processed video: `arrays` by name, and the text that stands for it."""

    arrays: dict[str, NDArray[Any]]
    run: str
    # Whether the model takes it as a video, and not as an image of many tiles.
    is_video: bool


@dataclass(frozen=True)
class Form:
    """How a type of model sees a video. `usual` are the settings that the model's files do not have."""

    sample: Rule
    usual: Mapping[str, Any]
    # Makes arrays of frames; tokens of one frame, where their number is fixed.
    arrays: Callable[[VideoProcessor, Source, list[int], Mapping[str, int]], dict[str, NDArray[Any]]]
    frame_tokens: Callable[[Any], int] | None = None
    is_video: bool = True


class VideoProcessor:
    """Processes one video after the other. `processor` is transformers' processor, whose class is in FORMS."""

    def __init__(self, processor: Any, settings: Mapping[str, Any], most_tokens: int) -> None:
        """`settings` are those of the model's files."""
        self.form = FORMS[type(processor).__name__]
        self.settings = dict(self.form.usual) | {name: value for name, value in settings.items() if value is not None}
        self._flatten_settings()
        self.processor = processor
        self._most_tokens = most_tokens
        names = ("merge_size", "temporal_patch_size")
        processor.video_processor = SimpleNamespace(**{name: self.settings.get(name) for name in names})

    @property
    def fingerprint(self) -> str:
        """Changes whenever the arrays of a video may change."""
        return json.dumps([sorted(self.settings.items()), self._most_tokens], default=str)

    def process(self, source: Source, ask: Ask, pixels: Mapping[str, int]) -> VideoArrays:
        """The arrays of a video. Raises ImageRefused."""
        if pixels and "shortest_edge" not in self._size:
            raise ImageRefused("cannot be resized by min_pixels and max_pixels: the model has fixed sizes")
        indices = self._chosen(source, ask)
        try:
            arrays = self.form.arrays(self, source, indices, pixels)
            run = self._run(source.clip, indices, arrays)
        except ValueError as error:
            if isinstance(error, ImageRefused):
                raise
            raise ImageRefused(f"cannot be used by this model: {error}") from None
        if type(self.processor).__name__ == "Qwen2_5_VLProcessor":
            shown = len(indices) / source.clip.count * source.clip.fps
            arrays["second_per_grid_ts"] = np.array([self.settings["temporal_patch_size"] / shown])
        values = arrays.pop("pixel_values_videos", None)
        if values is not None:
            arrays["pixel_values"] = values if self.form.is_video else values[0]
        return VideoArrays(arrays, run, self.form.is_video)

    def _flatten_settings(self) -> None:
        """Brings the older forms of settings into the present one."""
        sampling = self.settings.get("video_sampling")
        if isinstance(sampling, Mapping):  # SmolVLM
            self.settings |= {
                "num_frames": sampling.get("max_frames", self.settings.get("num_frames")),
                "fps": sampling.get("fps", self.settings.get("fps")),
                "size": sampling.get("video_size", self.settings["size"]),
            }
        size = dict(self.settings["size"])
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if name in self.settings and edge in self.form.usual["size"]:
                size[edge] = self.settings[name]
        self.settings["size"] = size

    @property
    def _size(self) -> dict[str, int]:
        found: dict[str, int] = self.settings["size"]
        return found

    def _chosen(self, source: Source, ask: Ask) -> list[int]:
        clip = source.clip
        most = min(MOST_FRAMES, self._most_frames())
        if not source.is_sampled:
            if clip.count > most:
                raise ImageRefused(f"has {clip.count} frames, and the model is shown {most} at most: send fewer")
            return list(range(clip.count))
        if ask.num_frames is not None and ask.num_frames > clip.count:
            raise ImageRefused(f"has {clip.count} frames, fewer than num_frames {ask.num_frames}: ask for fewer")
        indices = self.form.sample(clip, self.settings, ask)
        if len(indices) <= most:
            return indices
        if ask.num_frames is not None or ask.fps is not None:
            wanted = f"{len(indices)} frames are asked for"
            raise ImageRefused(f"cannot be shown: {wanted}, and the model is shown {most} at most: ask for fewer")
        return self.form.sample(clip, self.settings, Ask(num_frames=most))

    def _most_frames(self) -> int:
        if self.form.frame_tokens is not None:
            return max(1, self._most_tokens // max(1, self.form.frame_tokens(self.processor)))
        pair = int(self.settings["temporal_patch_size"])
        return max(1, min(self._most_tokens, MOST_FRAMES // pair)) * pair

    def _run(self, clip: Clip, indices: list[int], arrays: dict[str, NDArray[Any]]) -> str:
        from transformers.video_utils import VideoMetadata

        metadata = VideoMetadata(
            total_num_frames=clip.count,
            fps=clip.fps,
            duration=clip.seconds,
            width=clip.width,
            height=clip.height,
            frames_indices=list(indices),
        )
        return str(self.processor.replace_video_token(arrays | {"video_metadata": [metadata]}, 0))

    def normalized(self, frame: Any, *sizes: tuple[int, int]) -> NDArray[np.float32]:
        """A frame as [3, height, width], resized to each size (height, width) in turn."""
        resample = self.settings["resample"]
        for height, width in sizes:
            frame = frame.resize((width, height), resample)
        images = self.processor.image_processor
        array = np.moveaxis(np.asarray(frame), -1, 0)
        if self.settings.get("do_rescale", True):
            array = images.rescale(array, self.settings.get("rescale_factor", 1 / 255))
        if self.settings.get("do_normalize", True):
            array = images.normalize(array, self.settings["image_mean"], self.settings["image_std"])
        return np.asarray(array, np.float32)

    def patches(
        self, source: Source, indices: list[int], pixels: Mapping[str, int], in_time: bool
    ) -> dict[str, NDArray[Any]]:
        """Frames in patches, some frames together; `in_time`: limits of pixels are those of all frames together."""
        patch, pair, merge = (int(self.settings[name]) for name in ("patch_size", "temporal_patch_size", "merge_size"))
        size = self._fitted(source.clip, len(indices), pixels, in_time)
        frames = [self.normalized(frame, size) for frame in source.frames(indices)]
        frames += [frames[-1]] * (-len(frames) % pair)
        rows, columns = size[0] // patch, size[1] // patch
        steps = len(frames) // pair
        grid = (steps, pair, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        # Time, then blocks of patches that become one token, then a patch's colours, frames and pixels.
        order = (0, 3, 6, 4, 7, 2, 1, 5, 8)
        flat = np.stack(frames).reshape(grid).transpose(order).reshape(steps * rows * columns, -1)
        return {"pixel_values_videos": flat, "video_grid_thw": np.array([[steps, rows, columns]])}

    def _fitted(self, clip: Clip, count: int, pixels: Mapping[str, int], in_time: bool) -> tuple[int, int]:
        """Height and width of the frames that the model sees."""
        unit = int(self.settings["patch_size"]) * int(self.settings["merge_size"])
        pair = int(self.settings["temporal_patch_size"])
        frames = max(pair, round(count / pair) * pair) if in_time else 1
        steps = math.ceil(count / pair)
        # Pixels that make as many tokens as the operator lets a video have.
        allowed = self._most_tokens * unit * unit * (frames if in_time else 1) // steps
        longest = min(int(self._size["longest_edge"]), int(pixels.get("max_pixels", allowed)), allowed)
        longest = max(longest, unit * unit * frames)
        shortest = min(int(pixels.get("min_pixels", self._size["shortest_edge"])), longest)
        height, width = clip.height, clip.width
        if in_time and count < pair:
            raise ImageRefused(f"has {count} frames, and this model needs {pair} at least: send a longer one")
        if in_time and min(height, width) < unit:
            scale = unit / min(height, width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > _LONGEST_SHAPE * min(height, width):
            raise ImageRefused(f"has frames of {width} x {height} pixels: the sides may differ {_LONGEST_SHAPE} times")
        size = _within(height, width, unit, (frames, count if in_time else 1), (shortest, longest))
        return _shortened(size, unit, self._most_tokens // steps)

    def tiles(self, source: Source, indices: list[int]) -> NDArray[np.float32]:
        """Frames of the model's own size, [frames, 3, height, width]."""
        size = (int(self._size["height"]), int(self._size["width"]))
        return np.stack([self.normalized(frame, size) for frame in source.frames(indices)])


def _within(height: int, width: int, unit: int, frames: tuple[int, int], pixels: tuple[int, int]) -> tuple[int, int]:
    """Multiples of `unit` near height and width, such that all frames have pixels within the two bounds."""
    rounded, count = frames
    least, most = pixels
    tall = round(height / unit) * unit
    wide = round(width / unit) * unit
    if rounded * tall * wide > most:
        shrink = math.sqrt(count * height * width / most)
        tall = max(unit, math.floor(height / shrink / unit) * unit)
        wide = max(unit, math.floor(width / shrink / unit) * unit)
    elif rounded * tall * wide < least:
        grow = math.sqrt(least / (count * height * width))
        tall = math.ceil(height * grow / unit) * unit
        wide = math.ceil(width * grow / unit) * unit
    return tall, wide


def _shortened(size: tuple[int, int], unit: int, most_tokens: int) -> tuple[int, int]:
    """A size of at most this number of tokens, each a square of `unit` pixels, by its longer side.

    The short side of a narrow frame is a unit already, and cannot pay for the longer one.
    """
    tall, wide = size
    if tall * wide <= most_tokens * unit * unit:
        return size
    if tall < wide:
        return tall, max(1, most_tokens // (tall // unit)) * unit
    return max(1, most_tokens // (wide // unit)) * unit, wide


def _smolvlm(
    video: VideoProcessor, source: Source, indices: list[int], _: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    """Frames like images that are not split: the longest side first, then the square that the tower takes."""
    clip = source.clip
    side = min(4096, int(video.settings["size"]["longest_edge"]))
    short = int(side * min(clip.height, clip.width) / max(clip.height, clip.width))
    short = max(1, short + short % 2)
    first = (short, side) if clip.width >= clip.height else (side, short)
    square = int(video.settings["max_image_size"]["longest_edge"])
    frames = [video.normalized(frame, first, (square, square)) for frame in source.frames(indices)]
    return {"pixel_values": np.stack(frames)[None]}


FORMS: dict[str, Form] = {
    name: Form(
        qwen2,
        _PATCHES | _CLIP | {"size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}},
        lambda video, source, indices, pixels: video.patches(source, indices, pixels, in_time=False),
    )
    for name in ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")
} | {
    "Qwen3VLProcessor": Form(
        qwen3,
        _PATCHES | _HALF | {"patch_size": 16, "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}},
        lambda video, source, indices, pixels: video.patches(source, indices, pixels, in_time=True),
    ),
    "Glm4vProcessor": Form(
        glm4v,
        _PATCHES | _CLIP | {"size": {"shortest_edge": 112**2, "longest_edge": 2 * 30_000 * 28**2}},
        lambda video, source, indices, pixels: video.patches(source, indices, pixels, in_time=True),
    ),
    "SmolVLMProcessor": Form(
        smolvlm,
        _HALF
        | {
            "resample": _LANCZOS,
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
            "num_frames": 64,
            "fps": 1.0,
        },
        _smolvlm,
        lambda processor: int(processor.image_seq_len),
        is_video=False,
    ),
    "InternVLProcessor": Form(
        internvl,
        _CLIP | {"resample": _BICUBIC, "size": {"height": 384, "width": 384}, "num_frames": 8},
        lambda video, source, indices, _: {"pixel_values_videos": video.tiles(source, indices)[None]},
        lambda processor: int(processor.image_seq_length),
        is_video=False,
    ),
    "LlavaOnevisionProcessor": Form(
        default,
        _CLIP | {"resample": _BICUBIC, "size": {"height": 384, "width": 384}, "num_frames": 32},
        lambda video, source, indices, _: {"pixel_values_videos": video.tiles(source, indices)[None]},
        lambda processor: math.ceil(math.isqrt(int(processor.num_image_tokens)) / 2) ** 2,
    ),
}
