"""Frames, sizes and arrays of videos are those of transformers' classes, of which parts run here that need torch only.

Their resizing needs torchvision, which is not here: frames are resized as images are, with Pillow.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from api_server.media import video_sampling
from api_server.media.decode import ImageRefused
from api_server.media.processors import NoProcessor, Processor
from api_server.media.video_processors import FORMS, VideoArrays, VideoProcessor
from api_server.media.video_sampling import Ask, Rule
from api_server.media.videos import Clip, open_video
from tests.api_server.media import clips, models

CLASSES = {
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "glm4v": "Glm4vVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
}
RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "qwen2_vl": (video_sampling.qwen2, {"fps": 2.0, "temporal_patch_size": 2}),
    "qwen3_vl": (video_sampling.qwen3, {"fps": 2.0}),
    "glm4v": (video_sampling.glm4v, {"fps": 2.0}),
    "smolvlm": (video_sampling.smolvlm, {"fps": 1.0, "num_frames": 64}),
    "internvl": (video_sampling.internvl, {"num_frames": 8}),
    "llava_onevision": (video_sampling.default, {"num_frames": 32}),
}
ANIMATION = clips.animation("WEBP", 9, 500, (60, 44))


@pytest.fixture(scope="module")
def theirs() -> Iterator[dict[str, Any]]:
    """transformers' classes. Their files import torchvision, for functions that are not called here."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    names.append("torchvision.transforms.v2.functional")
    fakes = {name: ModuleType(name) for name in names}
    for name, fake in fakes.items():
        fake.__spec__ = importlib.machinery.ModuleSpec(name, None)
        if "." in name:
            owner, _, attribute = name.rpartition(".")
            setattr(fakes[owner], attribute, fake)
    sys.modules.update(fakes)
    files = [f"transformers.models.{model}.video_processing_{model}" for model in CLASSES]
    try:
        yield {
            model: getattr(importlib.import_module(file), CLASSES[model])
            for model, file in zip(CLASSES, files, strict=True)
        }
    finally:
        for name in (*names, *files):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("model", CLASSES)
def test_the_frames_are_those_of_transformers(model: str, theirs: dict[str, Any]) -> None:
    rule, settings = RULES[model]
    taken = theirs[model]
    compared = 0
    for count, fps in itertools.product((1, 2, 3, 7, 10, 31, 64, 100, 777, 5000), (1.0, 5.0, 24.0, 29.97, 60.0)):
        clip = Clip(count, fps, count / fps, 8, 8)
        for ask in (Ask(), Ask(fps=0.7), Ask(fps=3.0), Ask(num_frames=6)):
            if model == "glm4v" and ask.num_frames:
                continue  # transformers knows no number of frames there
            if model == "smolvlm" and ask.num_frames:
                continue  # which it takes for the most frames, and here it is their number
            metadata = VideoMetadata(count, fps=fps, duration=count / fps)
            itself = SimpleNamespace(**{name: getattr(taken, name, None) for name in dir(taken) if name[0] != "_"})
            # A number of frames and a rate exclude each other, the settings' too, but for SmolVLM.
            both = model == "smolvlm"
            itself.num_frames = settings.get("num_frames") if ask.fps is None or both else None
            itself.fps = settings.get("fps") if ask.num_frames is None or both else None
            asked = {"num_frames": ask.num_frames, "fps": ask.fps}
            try:
                expected = taken.sample_frames(itself, metadata, **asked)
            except (ValueError, ZeroDivisionError, RuntimeError):
                continue  # it takes no video so short
            wanted = [int(i) for i in expected]
            if wanted:
                compared += 1
                assert rule(clip, settings, ask) == wanted, (count, fps, ask)
    assert compared > 80


@pytest.mark.parametrize(
    ("model", "form"), [("qwen2_vl", "Qwen2VLProcessor"), ("qwen3_vl", "Qwen3VLProcessor"), ("glm4v", "Glm4vProcessor")]
)
def test_the_sizes_are_those_of_transformers(model: str, form: str, theirs: dict[str, Any]) -> None:
    usual = FORMS[form].usual
    processor = video_processor(form, most_tokens=1 << 40)
    resized = sys.modules[theirs[model].__module__].smart_resize
    unit = usual["patch_size"] * 2
    limits = {"factor": unit, "min_pixels": usual["size"]["shortest_edge"], "max_pixels": usual["size"]["longest_edge"]}
    in_time = model != "qwen2_vl"
    generator = np.random.default_rng(1)
    for _ in range(300):
        height, width = (int(side) for side in generator.integers(10, 2000, 2))
        frames = int(generator.integers(2, 60))
        count = {"num_frames": frames, "temporal_factor": 2} if in_time else {}
        expected = resized(height=height, width=width, **count, **limits)
        assert processor._fitted(Clip(frames, 2.0, 1.0, width, height), frames, {}, in_time) == tuple(expected)


def video_processor(form: str, most_tokens: int) -> VideoProcessor:
    return VideoProcessor(type(form, (), {})(), {}, most_tokens)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = models.write(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return of


def processed(path: Path, ask: Ask = Ask(), most: int = 5120, data: bytes = ANIMATION) -> VideoArrays:  # noqa: B008
    videos = Processor(str(path), 1280, most).videos
    assert videos is not None
    return videos.process(open_video([data], False, None), ask, {})


def test_patches_are_those_of_transformers(directory: Callable[[str], Path], theirs: dict[str, Any]) -> None:
    path = directory("qwen2_vl")
    found = processed(path)
    # Nine frames of half a second: eight are shown.
    assert found.arrays["video_grid_thw"].tolist() == [[4, 4, 4]]
    processor = Processor(str(path), 1280)
    assert processor.videos is not None
    source = open_video([ANIMATION], False, None)
    indices = video_sampling.qwen2(source.clip, processor.videos.settings, Ask())
    frames = [processor.videos.normalized(frame, (56, 56)) for frame in source.frames(indices)]
    patches, *grid = theirs["qwen2_vl"].patchify(None, torch.from_numpy(np.stack(frames))[None], 14, 2, 2)
    assert grid == [4, 4, 4]
    assert np.array_equal(found.arrays["pixel_values"], patches[0].numpy())
    assert found.run == "<|video_pad|>" * 16


def test_a_video_that_stands_still_has_the_patches_of_an_image(directory: Callable[[str], Path]) -> None:
    path = directory("qwen2_vl")
    image = Image.fromarray(clips.frame(5, (84, 56)))
    out = io.BytesIO()
    image.save(out, "PNG")
    processor = Processor(str(path), 1280)
    assert processor.videos is not None
    twice = processor.videos.process(open_video([out.getvalue()] * 2, True, 1.0), Ask(), {})
    alone = processor.process(image, "auto", {})
    assert np.array_equal(twice.arrays["pixel_values"], alone.arrays["pixel_values"])


def test_texts_of_a_video_tell_its_times(directory: Callable[[str], Path]) -> None:
    two = Ask(num_frames=4)
    qwen3 = processed(directory("qwen3_vl"), two)
    assert qwen3.run.startswith("<0.8 seconds><|vision_start|><|video_pad|>")
    assert qwen3.run.count("seconds>") == 2
    glm = processed(directory("glm4v"), two)
    assert glm.run.startswith("<|begin_of_image|><|image|>")
    assert glm.run.endswith("<|end_of_image|>3")
    smolvlm = processed(directory("smolvlm"))
    assert smolvlm.run.startswith(
        "You are provided the following series of four frames from a 0:00:04 [H:MM:SS] video."
    )
    assert "\nFrame from 00:02:<fake_token" in smolvlm.run
    assert smolvlm.arrays["pixel_values"].shape == (1, 4, 3, 32, 32)
    internvl = processed(directory("internvl"), two)
    assert internvl.run.startswith("Frame1: <img><IMG_CONTEXT>")
    assert internvl.arrays["pixel_values"].shape == (4, 3, 28, 28)
    seconds = processed(directory("qwen2_5_vl"), two).arrays["second_per_grid_ts"]
    assert seconds == pytest.approx([2.25]), "four frames in 4.5 s, two of them together"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "smolvlm", "internvl"])
def test_a_video_has_at_most_the_tokens_of_the_operator(name: str, directory: Callable[[str], Path]) -> None:
    for most in (16, 20):
        processor = Processor(str(directory(name)), 1280, most)
        run = processed(directory(name), most=most).run
        assert 0 < run.count(processor.facts.video_token) <= most


@pytest.mark.parametrize(
    ("form", "in_time"), [("Qwen2VLProcessor", False), ("Qwen3VLProcessor", True), ("Glm4vProcessor", True)]
)
def test_narrow_frames_have_at_most_the_tokens_of_the_operator(form: str, in_time: bool) -> None:
    unit = FORMS[form].usual["patch_size"] * 2
    for most, count, size in itertools.product((20, 384, 5120), (2, 3, 31, 40), ((20000, 101), (101, 20000), (90, 80))):
        height, width = video_processor(form, most)._fitted(Clip(count, 2.0, 1.0, *size), count, {}, in_time)
        tokens = math.ceil(count / 2) * (height // unit) * (width // unit)
        assert 0 < tokens <= most, (most, count, size)
        assert tokens * 4 > min(most, 4 * math.ceil(count / 2)), "no frame is shrunk further than it must be"


def test_a_model_without_a_token_for_videos_takes_images(tmp_path: Path) -> None:
    path = models.write(tmp_path / "trimmed", "qwen2_vl")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = path / name
        file.write_text(file.read_text().replace("<|video_pad|>", "<|other|>"))
    settings = path / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    found.pop("video_token", None)
    settings.write_text(json.dumps(found))
    processor = Processor(str(path), 1280)
    assert processor.videos is None
    assert "has no token" in processor.facts.no_videos
    assert processor.facts.placeholder == "<|image_pad|>"


def test_files_that_cannot_be_read_are_no_processor(tmp_path: Path) -> None:
    path = models.write(tmp_path / "odd", "qwen2_vl")
    (path / "video_preprocessor_config.json").write_text(json.dumps({"size": 7}))
    with pytest.raises(NoProcessor, match="cannot be loaded"):
        Processor(str(path), 1280)


def test_wishes_that_cannot_be_met_say_why(directory: Callable[[str], Path]) -> None:
    with pytest.raises(ImageRefused, match="has 9 frames, fewer than num_frames 10"):
        processed(directory("qwen2_vl"), Ask(num_frames=10))
    with pytest.raises(ImageRefused, match="9 frames are asked for, and the model is shown 4 at most"):
        processed(directory("internvl"), Ask(num_frames=9), most=16)
    videos = Processor(str(directory("internvl")), 1280).videos
    assert videos is not None
    source = open_video([ANIMATION], False, None)
    with pytest.raises(ImageRefused, match="fixed sizes"):
        videos.process(source, Ask(), {"max_pixels": 100})


def test_a_model_without_videos_says_so(directory: Callable[[str], Path]) -> None:
    processor = Processor(str(directory("llava")), 1280)
    assert processor.videos is None
    assert processor.facts.video_placeholder == ""
    assert "not supported for this type of model" in processor.facts.no_videos
