"""Each type of model whose images are served: the pipeline's answers are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interfaces import SamplingParams, TextAndVisionContext, TextGenerationInputs
from model_worker.pipelines.text import TextPipeline
from tests.model_worker.vision.tiny_composites import ALL, FUSED
from tests.model_worker.vision.tiny_parts import IMAGE, Tiny, made

TOKENS = 6


def context_of(tiny: Tiny, texts: list[list[int]], images: list[dict[str, Tensor]]) -> TextAndVisionContext:
    tokens, starts = tiny.prompt(texts)
    return TextAndVisionContext.from_prompt(
        tokens,
        SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        vision_token_ids=[IMAGE],
        images=[tiny.image(image, start) for image, start in zip(images, starts, strict=True)],
        log_probabilities=1,
    )


def generated(
    tiny: Tiny, texts: list[list[int]], images: list[dict[str, Tensor]], count: int = TOKENS
) -> tuple[list[int], Tensor]:
    """Tokens, and the log-probability of each, as transformers computes them."""
    tokens, _ = tiny.prompt(texts)
    tiny.model.set_attn_implementation("eager")
    tiny.model.generation_config.eos_token_id = None
    model: Any = tiny.model
    output = model.generate(
        **tiny.inputs(tokens, images),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = output.sequences[0, len(tokens) :]
    logits = torch.cat(output.logits).log_softmax(-1)
    return new.tolist(), logits[torch.arange(len(new)), new]


def answers(pipeline: TextPipeline, contexts: list[TextAndVisionContext]) -> list[tuple[list[int], Tensor]]:
    """Run all contexts together."""
    steps = {context.request_id: context for context in contexts}
    logprobs: dict[object, list[float]] = {name: [] for name in steps}
    while not all(context.is_done for context in contexts):
        for name, output in pipeline.execute(TextGenerationInputs(batches=[contexts], num_steps=1)).items():
            for entry in output.log_probabilities or ():
                logprobs[name] += entry.token_log_probabilities
    for context in contexts:
        pipeline.release(context.request_id)
    return [
        (context.tokens.all[context.prompt_length :].tolist(), torch.tensor(logprobs[context.request_id]))
        for context in contexts
    ]


def assert_equal(got: tuple[list[int], Tensor], want: tuple[list[int], Tensor]) -> None:
    assert got[0] == want[0]
    torch.testing.assert_close(got[1], want[1], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_answers_about_images_are_those_of_transformers(make: Callable[[], Tiny], tmp_path: Path) -> None:
    tiny = made(make)
    tiny.model.save_pretrained(tmp_path)
    images = [tiny.draw() for _ in range(4)]
    texts = [[], [1, 7, 8]] if tiny.first else [[3, 4, 5], [7, 8, 9]]
    cases = [(texts, images[:1]), (texts, images[1:2])]
    if not tiny.first:
        cases.append(([[3], [11, 12], [13, 14]], images[2:]))
    expected = [generated(tiny, *case) for case in cases]
    assert not torch.allclose(expected[0][1], expected[1][1], atol=1e-2), "the image matters"
    for budget in (512, 7):
        pipeline = TextPipeline.load(tmp_path, dtype="float32", kv_memory=1 << 22, max_batch_tokens=budget)
        try:
            assert (pipeline.backend == "fused stack") == (make in FUSED)
            for case, want in zip(cases, expected, strict=True):
                assert_equal(answers(pipeline, [context_of(tiny, *case)])[0], want)
            together = answers(pipeline, [context_of(tiny, *case) for case in [*cases, cases[0]]])
            for got, want in zip(together, [*expected, expected[0]], strict=True):
                assert_equal(got, want)
        finally:
            pipeline.close()


def test_a_prompt_may_be_cut_at_every_token(tmp_path: Path) -> None:
    tiny = made(next(make for make in ALL if make.__name__ == "qwen2_vl"))
    tiny.model.save_pretrained(tmp_path)
    case = ([[3, 4], [7, 8]], [tiny.draw()])
    want = generated(tiny, *case)
    pipeline = TextPipeline.load(tmp_path, dtype="float32", kv_memory=1 << 22)
    try:
        for cut in range(1, len(tiny.prompt(case[0])[0])):
            context = context_of(tiny, *case)
            context.tokens.chunk(cut)
            pipeline.execute(TextGenerationInputs(batches=[[context]], num_steps=1))
            assert_equal(answers(pipeline, [context])[0], want)
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"pixel_values": torch.zeros(1, 3, 16, 12)}, "cannot be encoded|makes .* vectors"),
        ({"pixel_values": torch.full((1, 3, 16, 16), torch.nan)}, "not finite"),
        ({"image_grid_thw": torch.tensor([[1, 2, 3]])}, "must be arguments of the model's encoder"),
    ],
)
def test_an_image_that_cannot_be_encoded_fails_its_request_alone(
    broken: dict[str, Tensor], complaint: str, tmp_path: Path
) -> None:
    tiny = made(next(make for make in ALL if make.__name__ == "llava"))
    tiny.model.save_pretrained(tmp_path)
    texts = [[3, 4], [7, 8]]
    arrays = tiny.draw()
    good = context_of(tiny, texts, [arrays])
    bad = context_of(tiny, texts, [arrays | broken])
    pipeline = TextPipeline.load(tmp_path, dtype="float32", kv_memory=1 << 22)
    try:
        with pytest.raises(ValueError, match=complaint):
            pipeline.execute(TextGenerationInputs(batches=[[good, bad]], num_steps=1))
        assert bad.is_done
        assert answers(pipeline, [good])[0][0] == generated(tiny, texts, [arrays])[0]
    finally:
        pipeline.close()


def test_placeholders_may_lie_outside_of_the_vocabulary(tmp_path: Path) -> None:
    tiny = made(next(make for make in ALL if make.__name__ == "llava"))
    tiny.model.save_pretrained(tmp_path)
    texts = [[3, 4], [7, 8]]
    arrays = tiny.draw()
    tokens, starts = tiny.prompt(texts)
    outside = np.where(tokens == IMAGE, 100_000, tokens)
    context = TextAndVisionContext.from_prompt(
        outside,
        SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        vision_token_ids=[100_000],
        images=[tiny.image(arrays, starts[0])],
    )
    pipeline = TextPipeline.load(tmp_path, dtype="float32", kv_memory=1 << 22)
    try:
        assert answers(pipeline, [context])[0][0] == generated(tiny, texts, [arrays])[0]
    finally:
        pipeline.close()
