"""The published faces of an embedder, against transformers run text by text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from interfaces import (
    EmbeddingsContext,
    EmbeddingsGenerationInputs,
    EmbeddingsGenerator,
    PipelineEmbeddingsGenerator,
    RequestID,
    TextContext,
    TokenBuffer,
)
from model_worker.pipelines.embeddings import EmbeddingsPipeline
from tests.model_worker.pooling.tiny_encoders import VOCAB, random_texts, save, write_modules


def contexts(tokens: Sequence[NDArray[np.int32]]) -> dict[RequestID, EmbeddingsContext]:
    return {
        RequestID(str(i)): TextContext(
            tokens=TokenBuffer(ids.astype(np.int64)), max_length=None, request_id=RequestID(str(i))
        )
        for i, ids in enumerate(tokens)
    }


def means(path: Path, tokens: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float64]]:
    model = AutoModel.from_pretrained(path).eval()
    with torch.no_grad():
        outputs = [model(input_ids=torch.tensor([ids.tolist()])) for ids in tokens]
    return [output.last_hidden_state[0].double().numpy().mean(0) for output in outputs]


def test_a_batch_gets_the_vectors_of_its_texts(tmp_path: Path) -> None:
    path = save("bert", tmp_path)
    pipeline = EmbeddingsPipeline.load(path, max_batch_tokens=150, normalize=False)
    tokens = random_texts(9)
    batch = contexts(tokens)
    halves: list[dict[RequestID, EmbeddingsContext]] = [{}, {}]
    for i, (name, context) in enumerate(batch.items()):
        halves[i % 2][name] = context
    outputs = pipeline.execute(EmbeddingsGenerationInputs(halves))
    assert outputs.keys() == batch.keys()
    for name, vector in zip(batch, means(path, tokens), strict=True):
        assert outputs[name].embeddings.dtype == np.float32
        np.testing.assert_allclose(outputs[name].embeddings, vector, atol=3e-5)
    generator = PipelineEmbeddingsGenerator(pipeline)
    assert isinstance(generator, EmbeddingsGenerator)
    again = generator.encode(batch)
    np.testing.assert_allclose(again[RequestID("3")].embeddings, outputs[RequestID("3")].embeddings, atol=1e-6)
    assert pipeline.execute(EmbeddingsGenerationInputs([])) == {}


def test_the_caller_may_say_how_to_pool(tmp_path: Path) -> None:
    path = save("bert", tmp_path)
    write_modules(path, "Transformer", "Pooling", "Normalize", configs=[{"pooling_mode": "cls"}])
    tokens = random_texts(3)
    pipeline = EmbeddingsPipeline.load(path, pooling="mean")
    outputs = pipeline.execute(EmbeddingsGenerationInputs([contexts(tokens)]))
    for i, vector in enumerate(means(path, tokens)):
        np.testing.assert_allclose(outputs[RequestID(str(i))].embeddings, vector / np.linalg.norm(vector), atol=1e-5)
    with pytest.raises(ValueError, match="pooling 'median' is unknown: use one of cls, max"):
        EmbeddingsPipeline.load(path, pooling="median")


def test_what_cannot_be_embedded_is_refused_by_name(tmp_path: Path) -> None:
    pipeline = EmbeddingsPipeline.load(save("bert", tmp_path))
    for tokens, complaint in (
        ([5] * 201, "request 0 has 201 tokens; this model takes 200"),
        ([VOCAB], "outside 0..150"),
    ):
        with pytest.raises(ValueError, match=complaint):
            pipeline.execute(EmbeddingsGenerationInputs([contexts([np.array(tokens, np.int32)])]))
