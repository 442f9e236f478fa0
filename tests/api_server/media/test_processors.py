"""Arrays and tokens of images equal those of transformers' own processors, for a tiny model of each family."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from api_server.media.decode import ImageRefused
from api_server.media.images import ProcessedImage
from api_server.media.processors import LOW_DETAIL_TOKENS, NoProcessor, Processor
from api_server.text.image_prompt import Pictures
from api_server.text.tokenizer import Tokenizer
from tests.api_server.media import models

UNLIMITED = 1 << 20
SIZES = ((28, 28), (100, 70), (33, 200), (160, 20), (129, 257))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = models.write(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return of


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def processed(processor: Processor, images: list[Image.Image]) -> list[ProcessedImage]:
    found = [processor.process(image, "auto", {}) for image in images]
    return [ProcessedImage(dict(each.arrays), each.run, i) for i, each in enumerate(found)]


def called(path: Path, name: str, images: list[Image.Image], text: str) -> dict[str, Any]:
    """The outputs of transformers' processor."""
    options: dict[str, Any] = {"return_tensors": "np"}
    if models.FAMILIES[name].processor_class == "PixtralProcessor":
        options = {"text_kwargs": {"return_tensors": "np"}, "images_kwargs": {"return_tensors": "np"}}
    return dict(models.reference(path, name)(images=images, text=[text], **options))


@pytest.mark.parametrize("name", models.FAMILIES)
def test_arrays_and_tokens_are_those_of_transformers(name: str, directory: Callable[[str], Path]) -> None:
    path = directory(name)
    processor = Processor(str(path), UNLIMITED)
    tokenizer = Tokenizer.load(str(path))
    for size in SIZES:
        image = picture(size)
        text = f"What is{processor.facts.placeholder} in this?\n"
        expected = called(path, name, [image], text)
        (found,) = processed(processor, [image])
        masks = {"pixel_attention_mask", "pixel_mask"} & expected.keys() - found.arrays.keys()
        assert all(np.all(expected.pop(mask)) for mask in masks)  # an absent mask stands for one without holes
        texts = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels"}
        assert found.arrays.keys() == expected.keys() - texts
        for key, array in found.arrays.items():
            assert isinstance(array, np.ndarray)
            assert array.dtype == np.asarray(expected[key]).dtype
            assert array.tobytes() == np.ascontiguousarray(expected[key]).tobytes(), (key, size)
        pictures = Pictures(processor.facts, [found])
        ids = np.array(tokenizer.ids_of("".join(pictures.expanded([text]))), np.int32)
        assert ids.tolist() == np.asarray(expected["input_ids"])[0].tolist()
        (placed,) = pictures.placed(ids)
        inside = ids[placed.start : placed.end]
        assert inside[0] == inside[-1] == processor.facts.token_id
        assert (ids == processor.facts.token_id).sum() == (inside == processor.facts.token_id).sum()


@pytest.mark.parametrize("name", ["llava", "internvl", "idefics3", "mistral3", "qwen2_vl"])
def test_several_images_of_a_prompt_have_their_own_places(name: str, directory: Callable[[str], Path]) -> None:
    path = directory(name)
    processor = Processor(str(path), UNLIMITED)
    tokenizer = Tokenizer.load(str(path))
    images = [picture(size, i) for i, size in enumerate(SIZES)]
    mark = processor.facts.placeholder
    text = f"{mark}{mark} Look: {mark}, {mark}\n{mark}"
    found = processed(processor, images)
    pictures = Pictures(processor.facts, found)
    ids = np.array(tokenizer.ids_of("".join(pictures.expanded([text]))), np.int32)
    expected = called(path, name, images, text)
    assert ids.tolist() == np.asarray(expected["input_ids"])[0].tolist()
    placed = pictures.placed(ids)
    assert [each.image for each in placed] == found
    lengths = [(ids[each.start : each.end] == processor.facts.token_id).sum() for each in placed]
    assert lengths == [each.run.count(processor.facts.token) for each in found]
    assert all(a.end <= b.start for a, b in itertools.pairwise(placed))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "idefics3", "smolvlm", "internvl", "pixtral"])
def test_an_image_has_at_most_the_tokens_of_the_operator(name: str, directory: Callable[[str], Path]) -> None:
    for most in (16, 20):
        processor = Processor(str(directory(name)), most)
        for size in ((400, 300), (1000, 90), (64, 64)):
            run = processor.process(picture(size), "auto", {}).run
            assert 0 < run.count(processor.facts.token) <= most
            original = processor.process(picture(size), "original", {}).run
            assert original.count(processor.facts.token) >= run.count(processor.facts.token)


def test_low_detail_has_few_tokens(tmp_path: Path) -> None:
    path = models.write(tmp_path / "m", "qwen2_vl")
    settings = path / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace(str(28 * 28 * 24), str(28 * 28 * 2000)))
    processor = Processor(str(path), UNLIMITED)
    image = picture((1000, 800))
    assert processor.process(image, "high", {}).run.count(processor.facts.token) > 900
    low = processor.process(image, "low", {}).run.count(processor.facts.token)
    assert LOW_DETAIL_TOKENS // 2 < low <= LOW_DETAIL_TOKENS
    fewer = processor.process(image, "auto", {"max_pixels": 28 * 28 * 9}).run.count(processor.facts.token)
    assert 4 <= fewer <= 9
    with pytest.raises(ImageRefused, match="absolute aspect ratio"):
        processor.process(picture((1, 5000)), "auto", {})


def test_a_model_of_fixed_sizes_refuses_pixels(directory: Callable[[str], Path]) -> None:
    with pytest.raises(ImageRefused, match="fixed sizes"):
        Processor(str(directory("llava")), UNLIMITED).process(picture((9, 9)), "auto", {"max_pixels": 100})


def test_a_model_without_a_processor_says_so(model_directory: Path) -> None:
    with pytest.raises(NoProcessor):
        Processor(str(model_directory), UNLIMITED)
