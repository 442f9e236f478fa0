"""A pipeline that speaks: sentence by sentence, and as the older protocol."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from interfaces import (
    AudioGenerationInputs,
    AudioGenerator,
    GenerationStatus,
    PoolingTask,
    RequestID,
    SynthesisContext,
)
from model_worker.pipelines.speech import SpeechPipeline
from tests.model_worker.speech.tiny_vits import SIZES, Reference, tiny_vits

TEXTS = [[3, 5, 7], [4, 4], [9, 8, 7, 6]]


def context(texts: list[list[int]], first_seed: int) -> SynthesisContext:
    seeds = np.arange(first_seed, first_seed + len(texts))
    return SynthesisContext.of(texts, PoolingTask.SPEAK, seeds=seeds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_vits(tmp_path)


def test_each_chunk_is_the_next_sentence(folder: Path) -> None:
    pipeline = SpeechPipeline.load(folder)
    reference = Reference(folder)
    several, one = context(TEXTS, 5), context(TEXTS[:1], 9)
    batch: dict[RequestID, SynthesisContext] = {several.request_id: several, one.request_id: one}
    for place, text in enumerate(TEXTS):
        outputs = pipeline.execute(AudioGenerationInputs(batch))
        spoken = outputs[several.request_id]
        np.testing.assert_allclose(spoken.audio_data, reference.samples(text, 5 + place), atol=1e-6)
        assert spoken.is_done == (place == 2)
        metadata = spoken.metadata
        facts = (metadata.chunk_id, metadata.final_chunk, metadata.sample_rate, metadata.request_id)
        assert facts == (place, place == 2, SIZES["sampling_rate"], str(several.request_id))
        ended = outputs[one.request_id]
        assert (ended.final_status, bool(ended.audio_data.size)) == (GenerationStatus.END_OF_SEQUENCE, place == 0)
    pipeline.release(several.request_id)
    again = pipeline.execute(AudioGenerationInputs({several.request_id: several}))[several.request_id]
    np.testing.assert_allclose(again.audio_data, reference.samples(TEXTS[0], 5), atol=1e-6)


def test_the_older_protocol(folder: Path) -> None:
    generator = SpeechPipeline.load(folder).generator
    assert isinstance(generator, AudioGenerator)
    assert (generator.decoder_sample_rate, generator.prev_num_steps) == (SIZES["sampling_rate"], 0)
    spoken = context(TEXTS, 1)
    reference = Reference(folder)
    batch = {spoken.request_id: spoken}
    chunks = []
    while batch:
        for name, chunk in generator.next_chunk(batch).items():
            chunks.append(chunk.audio_data)
            if chunk.is_done:
                generator.release(batch.pop(name))
    expected = [reference.samples(text, 1 + i) for i, text in enumerate(TEXTS)]
    np.testing.assert_allclose(np.concatenate(chunks), np.concatenate(expected), atol=1e-6)


def test_a_sentence_that_cannot_be_spoken_takes_no_other_with_it(folder: Path) -> None:
    pipeline = SpeechPipeline.load(folder)
    good, bad = context(TEXTS, 1), context([[999]], 1)
    with pytest.raises(ValueError, match="token id 999"):
        pipeline.execute(AudioGenerationInputs({good.request_id: good, bad.request_id: bad}))
    spoken = pipeline.execute(AudioGenerationInputs({good.request_id: good}))[good.request_id]
    assert spoken.metadata.chunk_id == 0
