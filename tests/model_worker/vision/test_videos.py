"""Models that are shown videos: the pipeline's answers are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interfaces import ImageMetadata, SamplingParams, TextAndVisionContext
from model_worker.pipelines.text import TextPipeline
from model_worker.vision.positions import GridPositions, grid_positions
from tests.model_worker.vision import tiny_composites
from tests.model_worker.vision.test_families import TOKENS, answers, assert_equal
from tests.model_worker.vision.tiny_parts import BEGIN, END, IMAGE, Tiny, made

VIDEO = 191
FRAMES = 3
QUESTION = [7, 8, 9]


@dataclass(frozen=True)
class Film:
    """A video in front of a family's model: its tokens, and its arrays by the names of the model's arguments."""

    make: Callable[[], Tiny]
    tokens: list[int]
    draw: Callable[[], dict[str, Tensor]]
    # The token of its features.
    token: int = VIDEO
    is_video: bool = True

    @property
    def pixels(self) -> str:
        return "pixel_values_videos" if self.is_video else "pixel_values"

    def metadata(self, arrays: dict[str, Tensor], start: int) -> ImageMetadata:
        places = start + np.flatnonzero(np.array(self.tokens) == self.token)
        return ImageMetadata(
            start_idx=int(places[0]),
            end_idx=int(places[-1]) + 1,
            pixel_values=arrays[self.pixels].numpy(),
            extras={name: array.numpy() for name, array in arrays.items() if name != self.pixels},
            is_video=self.is_video,
        )


def _patches(**others: Tensor) -> Callable[[], dict[str, Tensor]]:
    grid = torch.tensor([[FRAMES, 4, 6]])
    return lambda: {"pixel_values_videos": torch.randn(FRAMES * 24, 96), "video_grid_thw": grid} | others


def _stamped(token: int, *outer: int) -> list[int]:
    """Frames with a text before each, which stands for its time."""
    frames = [part for i in range(FRAMES) for part in (20 + i, 30, BEGIN, *[token] * 6, END)]
    return [*outer[:1], *frames, *outer[1:]]


def _tiles(shape: tuple[int, ...]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(*shape)}


WHOLE = [BEGIN, *[VIDEO] * 18, END]
FILMS = {
    "qwen2_vl": Film(tiny_composites.qwen2_vl, WHOLE, _patches()),
    # Time counts two seconds a pair, so that the last frames stand behind the text that follows.
    "qwen2_5_vl": Film(
        tiny_composites.qwen2_5_vl, WHOLE, _patches(second_per_grid_ts=torch.tensor([2.3], dtype=torch.float64))
    ),
    "qwen3_5": Film(tiny_composites.qwen3_5, _stamped(VIDEO, BEGIN, END), _patches()),
    "qwen3_vl": Film(tiny_composites.qwen3_vl, _stamped(VIDEO, BEGIN, END), _patches()),
    "qwen3_vl_moe": Film(tiny_composites.qwen3_vl_moe, _stamped(VIDEO, BEGIN, END), _patches()),
    "glm4v": Film(tiny_composites.glm4v, _stamped(IMAGE, 194, 195), _patches(), IMAGE),
    "llava_onevision": Film(
        tiny_composites.llava_onevision,
        [VIDEO] * (FRAMES * 4 + 1),
        lambda: {"pixel_values_videos": torch.randn(1, FRAMES, 3, 16, 16)},
    ),
    "smolvlm": Film(
        tiny_composites.smolvlm, [4, *[IMAGE] * 4, 5] * FRAMES, _tiles((1, FRAMES, 3, 16, 16)), IMAGE, False
    ),
    "internvl": Film(
        tiny_composites.internvl, [4, *[IMAGE] * 4, 5] * FRAMES, _tiles((FRAMES, 3, 16, 16)), IMAGE, False
    ),
}


def generated(tiny: Tiny, film: Film, tokens: list[int], inputs: dict[str, Tensor]) -> tuple[list[int], Tensor]:
    """Tokens, and the log-probability of each, as transformers computes them."""
    ids = torch.tensor([tokens])
    # 1 for the tokens of images, 2 for those of videos; here those of a video come first.
    kind = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if film.token == IMAGE and film.is_video:
        kind[0, : len(film.tokens)] *= 2
    needs_kind = bool(tiny.begin)
    tiny.model.set_attn_implementation("eager")
    tiny.model.generation_config.eos_token_id = None
    model: Any = tiny.model
    output = model.generate(
        input_ids=ids,
        **inputs,
        **({"mm_token_type_ids": kind} if needs_kind else {}),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = output.sequences[0, len(tokens) :]
    logits = torch.cat(output.logits).log_softmax(-1)
    return new.tolist(), logits[torch.arange(len(new)), new]


def context_of(tokens: list[int], images: list[ImageMetadata]) -> TextAndVisionContext:
    return TextAndVisionContext.from_prompt(
        np.array(tokens),
        SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        vision_token_ids=[IMAGE, VIDEO],
        images=images,
        log_probabilities=1,
    )


@pytest.mark.parametrize("name", FILMS)
def test_answers_about_videos_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    film = FILMS[name]
    tiny = made(film.make)
    tiny.model.save_pretrained(tmp_path)
    one, two, picture = film.draw(), film.draw(), tiny.draw()
    tokens = [*film.tokens, *QUESTION]
    cases = [(tokens, arrays, [film.metadata(arrays, 0)]) for arrays in (one, two)]
    if film.is_video and name != "glm4v":  # whose forward pass in transformers takes one or the other
        # An image behind a video, with a text between them.
        start = len(tokens) + len(tiny.begin)
        both = [*tokens, *tiny.begin, *[IMAGE] * tiny.tokens, *tiny.end, 11]
        cases.append((both, one | picture, [film.metadata(one, 0), tiny.image(picture, start)]))
    expected = [generated(tiny, film, tokens, inputs) for tokens, inputs, _ in cases]
    assert not torch.allclose(expected[0][1], expected[1][1], atol=1e-2), "the video matters"
    for budget in (512, 7):
        pipeline = TextPipeline.load(tmp_path, dtype="float32", kv_memory=1 << 22, max_batch_tokens=budget)
        try:
            for (tokens, _, images), want in zip(cases, expected, strict=True):
                assert_equal(answers(pipeline, [context_of(tokens, images)])[0], want)
            together = answers(pipeline, [context_of(tokens, images) for tokens, _, images in cases])
            for got, want in zip(together, expected, strict=True):
                assert_equal(got, want)
        finally:
            pipeline.close()


def positions(**given: Any) -> GridPositions:
    grid = given.pop("grid", [[FRAMES, 4, 6]])
    extras = {"video_grid_thw": np.array(grid)} | given
    pixels = np.zeros((1, 1), np.float32)
    video = ImageMetadata(start_idx=2, end_idx=20, pixel_values=pixels, extras=extras, is_video=True)
    return grid_positions([video], [np.arange(2, 20)], merge_size=2, tokens_per_second=2.0)


def test_text_goes_on_behind_the_longer_side_of_a_video_however_long_it_took() -> None:
    assert positions().first[0, 2:20:6].tolist() == [2, 3, 4]
    slow = positions(second_per_grid_ts=np.array([4.0]))
    assert slow.first[0, 2:20:6].tolist() == [2, 10, 18]
    assert slow.at(19, 4).tolist() == [[18, 5, 6, 7], [3, 5, 6, 7], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"grid": [[2, 4, 6]]}, "makes 12 tokens, and 18 stand"),
        ({"grid": [[0, 4, 6]]}, "makes 0 tokens"),
        ({"grid": [4, 6]}, "three numbers"),
        ({"second_per_grid_ts": np.array([np.nan])}, "one number above 0"),
        ({"second_per_grid_ts": np.array([1.0, 2.0])}, "one number above 0"),
    ],
)
def test_a_grid_that_cannot_be_is_an_error(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        positions(**given)
