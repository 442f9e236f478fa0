"""Each type of model that hears: the pipeline's answers are those of transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from interfaces import ImageMetadata, SamplingParams, TextAndVisionContext, TextGenerationInputs
from model_worker.execution.images import image_rows
from model_worker.pipelines.text import TextPipeline
from tests.model_worker.hearing.tiny_listeners import FAMILIES, RATE, TOKENS, Listening, Sound, made
from tests.model_worker.hearing.tiny_whisper import speech
from tests.system.in_process import load

TEXTS = ["the quick ", " fox"]


def context_of(tiny: Listening, texts: list[str], sounds: list[Sound]) -> TextAndVisionContext:
    heard = [tiny.heard(sound) for sound in sounds]
    tokens = np.array(tiny.prompt(texts, [count for _, count in heard]))
    ends = np.cumsum([count for _, count in heard]).tolist()
    places = np.flatnonzero(tokens == tiny.token_id)
    images = []
    for (arrays, count), end in zip(heard, ends, strict=True):
        extras: dict[str, Any] = {name: value.numpy() for name, value in arrays.items() if name != "input_features"}
        features = arrays["input_features"].numpy()
        images.append(
            ImageMetadata(
                start_idx=int(places[end - count]),
                end_idx=int(places[end - 1]) + 1,
                pixel_values=features,
                extras=extras,
            )
        )
    return TextAndVisionContext.from_prompt(
        tokens,
        SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        vision_token_ids=[tiny.token_id],
        images=images,
    )


def answers(pipeline: TextPipeline, contexts: list[TextAndVisionContext]) -> list[list[int]]:
    """Run all contexts together."""
    while not all(context.is_done for context in contexts):
        pipeline.execute(TextGenerationInputs(batches=[contexts], num_steps=1))
    for context in contexts:
        pipeline.release(context.request_id)
    return [context.tokens.all[context.prompt_length :].tolist() for context in contexts]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_about_sounds_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = made(name, tmp_path)
    sounds = [speech(1, 0.9), speech(2, tiny.family.seconds), speech(3, 1.3)]
    cases: list[tuple[list[str], list[Sound]]] = [(TEXTS, [sound]) for sound in sounds]
    cases.append(([*TEXTS, " dog"], sounds[:2]))
    expected = [tiny.answer(*case) for case in cases]
    assert len({tuple(answer) for answer in expected}) > 2, "the sound matters"
    for budget in (512, 7):
        pipeline = TextPipeline.load(tmp_path, dtype="float32", kv_memory=1 << 22, max_batch_tokens=budget)
        try:
            assert answers(pipeline, [context_of(tiny, *case) for case in cases]) == expected
        finally:
            pipeline.close()


def test_a_sound_that_cannot_be_encoded_fails_its_request_alone(tmp_path: Path) -> None:
    tiny = made("qwen2_audio", tmp_path)
    sound = speech(4, 1.0)
    good = context_of(tiny, TEXTS, [sound])
    bad = context_of(tiny, TEXTS, [sound])
    bad.images[0].pixel_values = bad.images[0].pixels[:, :, : RATE // 160]
    pipeline = TextPipeline.load(tmp_path, dtype="float32", kv_memory=1 << 22)
    try:
        with pytest.raises(ValueError, match="a sound cannot be encoded"):
            pipeline.execute(TextGenerationInputs(batches=[[good, bad]], num_steps=1))
        assert bad.is_done
        assert answers(pipeline, [good]) == [tiny.answer(TEXTS, [sound])]
    finally:
        pipeline.close()


def test_a_sound_is_encoded_window_by_window_while_its_row_is_there(tmp_path: Path) -> None:
    tiny = made("glmasr", tmp_path)
    image = context_of(tiny, TEXTS, [speech(5, 4.7)]).images[0]
    rows = image_rows(load(tmp_path))
    assert rows is not None
    encoder = rows.encoder
    windows = []
    composite: Any = encoder.composite
    method = composite.get_audio_features

    def counted(input_features: Tensor, input_features_mask: Tensor) -> Any:
        windows.append(len(input_features))
        return method(input_features, input_features_mask)

    together = encoder.encode(image)
    composite.get_audio_features = counted
    del encoder.__dict__["_heard"]
    asked = iter([True, True, False])
    apart = encoder.encoded(image, 0, "", lambda: next(asked))
    assert apart is not None
    np.testing.assert_allclose(apart, together, rtol=1e-3, atol=1e-3)
    assert windows == [1, 1, 1]
    assert encoder.encoded(image, 0, "", lambda: next(asked)) is None
    assert windows == [1, 1, 1, 1]
