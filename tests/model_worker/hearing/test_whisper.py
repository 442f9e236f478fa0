"""Whisper on the paged engine: its transcripts are those of transformers' `generate`, alone and beside others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from interfaces import (
    ImageMetadata,
    ProcessorInputs,
    SamplingParams,
    TextAndVisionContext,
    TextContext,
    TextGenerationInputs,
)
from model_worker.hearing.rules import TranscriptRules
from model_worker.model import ModelRefused
from model_worker.pipelines.text import TextPipeline
from shared.recogniser_files import RULES, RecogniserFiles, clip_tokens
from tests.model_worker.hearing.tiny_whisper import POSITIONS, TARGETS, features, load, speech, tiny_whisper

CLIP = clip_tokens(POSITIONS)
# Logits this near to each other may change places with the shape of a batch.
NEAR = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def files(folder: Path) -> RecogniserFiles:
    found = RecogniserFiles.read(str(folder), lambda _: None)
    assert found is not None
    return found


def rules(files: RecogniserFiles, timestamps: bool) -> dict[str, Any]:
    given: dict[str, Any] = {
        "suppressed": list(files.suppressed),
        "suppressed_at_begin": list(files.suppressed_at_begin),
    }
    if timestamps:
        given |= {"first_timestamp": files.first_timestamp, "end": files.end, "latest_first": files.latest_first}
    return given


def context_of(
    files: RecogniserFiles, clip: NDArray[np.float32], timestamps: bool, number: int
) -> TextAndVisionContext:
    prompt = [files.start, files.languages["de"], files.tasks["transcribe"]]
    if not timestamps:
        assert files.no_timestamps is not None
        prompt.append(files.no_timestamps)
    return TextAndVisionContext.from_prompt(
        [files.placeholder] * CLIP + prompt,
        SamplingParams(
            max_new_tokens=TARGETS - len(prompt),
            temperature=0.0,
            stop_token_ids=[files.end],
            named_processors={RULES: json.dumps(rules(files, timestamps))},
        ),
        vision_token_ids=[files.placeholder],
        images=[ImageMetadata(start_idx=0, end_idx=CLIP, pixel_values=clip, image_hash=number)],
    )


def answers(pipeline: TextPipeline, contexts: list[TextAndVisionContext]) -> list[list[int]]:
    while not all(context.is_done for context in contexts):
        pipeline.execute(TextGenerationInputs(batches=[contexts], num_steps=1))
    for context in contexts:
        pipeline.release(context.request_id)
    return [context.tokens.all[context.prompt_length :].tolist() for context in contexts]


def assert_same(got: list[int], clip: NDArray[np.float32], timestamps: bool, model: Any) -> None:
    """Compare a transcript with transformers', up to a place where two tokens are about equally likely."""
    output = model.generate(
        torch.from_numpy(clip)[None],
        language="de",
        task="transcribe",
        return_timestamps=timestamps,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        force_unique_generate_call=True,
    )
    want = output.sequences[0, -len(output.scores) :].tolist()
    for place, (mine, theirs) in enumerate(zip(got, want, strict=False)):
        if mine != theirs:
            scores = output.scores[place][0]
            assert scores[theirs] - scores[mine] < NEAR, (place, got, want)
            return
    assert len(got) == len(want)


@pytest.mark.parametrize("timestamps", [False, True])
def test_transcripts_are_those_of_transformers(folder: Path, files: RecogniserFiles, timestamps: bool) -> None:
    model = load(folder)
    clips = [features(speech(number, 0.6 + 0.1 * number)) for number in range(5)]
    # Pieces of 100 tokens cut clips.
    pipeline = TextPipeline.load(folder, dtype="float32", max_batch_size=8, kv_memory=16 << 20, max_batch_tokens=100)
    contexts = [context_of(files, clip, timestamps, number) for number, clip in enumerate(clips)]
    together = answers(pipeline, contexts)
    for number, (clip, tokens) in enumerate(zip(clips, together, strict=True)):
        assert_same(tokens, clip, timestamps, model)
        (alone,) = answers(pipeline, [context_of(files, clip, timestamps, number)])
        assert_same(alone, clip, timestamps, model)
    assert len({tuple(tokens) for tokens in together}) > 1


def test_a_clip_of_the_wrong_shape_fails_alone(folder: Path, files: RecogniserFiles) -> None:
    pipeline = TextPipeline.load(folder, dtype="float32", max_batch_size=4, kv_memory=16 << 20)
    context = context_of(files, np.zeros((8, 30), np.float32), False, 1)
    with pytest.raises(ValueError, match=r"features of the shape \[8, 100\], got \[8, 30\]"):
        answers(pipeline, [context])


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("quantization", "int8", "quantization int8 is not supported for speech"),
        ("kv_dtype", "int8", "kv_dtype int8 is not supported for speech"),
        ("max_length", CLIP, "max_model_len must be above 256"),
        ("max_length", CLIP + TARGETS + 1, "max_model_len must be at most the model's 280 positions"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, option: str, value: Any, reason: str) -> None:
    with pytest.raises((ModelRefused, ValueError), match=reason):
        TextPipeline.load(folder, **{option: value})


def test_rules_are_those_of_transformers(folder: Path, files: RecogniserFiles) -> None:
    generation: Any = load(folder).generation_config
    begin = 3
    processors = [
        SuppressTokensAtBeginLogitsProcessor(generation.begin_suppress_tokens, begin),
        SuppressTokensLogitsProcessor(generation.suppress_tokens),
        WhisperTimeStampLogitsProcessor(generation, begin_index=begin),
    ]
    generator = np.random.default_rng()
    own = TranscriptRules(rules(files, True))
    for _ in range(200):
        count = int(generator.integers(0, 6))
        times = files.first_timestamp + np.sort(generator.integers(0, POSITIONS, count))
        words = generator.integers(20, 500, count)
        tokens = np.where(generator.random(count) < 0.6, times, words).tolist()
        logits = torch.from_numpy(generator.standard_normal(files.vocab_size).astype(np.float32)) * 3
        sequence = torch.tensor([[files.start, files.languages["de"], files.tasks["transcribe"], *tokens]])
        want = logits[None]
        for processor in processors:
            want = processor(sequence, want)
        context = TextContext.from_prompt([1, 2, 3], SamplingParams())
        context.receive_tokens(tokens)
        got = logits[None].clone()
        own(ProcessorInputs(got, context))
        torch.testing.assert_close(got, want)
