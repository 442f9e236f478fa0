"""Embeddings offline, against transformers run text by text without padding, and pooled in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel

from interfaces import (
    EmbeddingsContext,
    EmbeddingsGenerationInputs,
    EmbeddingsGenerator,
    PipelineEmbeddingsGenerator,
    RequestID,
    TextContext,
    TokenBuffer,
)
from model_worker.model import ModelRefused
from model_worker.pipelines.embeddings import EmbeddingsPipeline, Pooling

VOCAB = 97
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "roberta": {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 66,
        "pad_token_id": 1,
    },
    "llama": {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}


def checkpoint(kind: str, path: Path) -> Path:
    torch.manual_seed(np.random.default_rng().integers(2**31))
    model = AutoModel.from_config(AutoConfig.for_model(kind, **CONFIGS[kind], initializer_range=0.3))
    model.save_pretrained(path)
    return path


def sentence_transformer(path: Path, mode: str, normalize: bool, extra: str = "") -> Path:
    """The files beside the weights that say how to pool."""
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize + [extra] * bool(extra)
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": f"models.{kind}"} for i, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": 48, "pooling_mode_max_tokens": False, mode: True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


def texts(count: int) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng()
    return [rng.integers(2, VOCAB, rng.integers(1, 60)) for _ in range(count)]


def contexts(tokens: Sequence[NDArray[np.int64]]) -> dict[RequestID, EmbeddingsContext]:
    return {
        RequestID(str(i)): TextContext(tokens=TokenBuffer(ids), max_length=None, request_id=RequestID(str(i)))
        for i, ids in enumerate(tokens)
    }


def expected(path: Path, tokens: Sequence[NDArray[np.int64]], mode: str, normalize: bool) -> list[NDArray[np.float64]]:
    model = AutoModel.from_pretrained(path).eval()
    vectors = []
    for ids in tokens:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids.tolist()])).last_hidden_state[0].double().numpy()
        vector = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[mode]
        vectors.append(vector / np.linalg.norm(vector) if normalize else vector)
    return vectors


@pytest.mark.parametrize(
    ("kind", "file_mode", "mode", "normalize"),
    [
        ("bert", "pooling_mode_mean_tokens", "mean", True),
        ("bert", "pooling_mode_cls_token", "cls", False),
        ("roberta", "pooling_mode_mean_tokens", "mean", False),
        ("llama", "pooling_mode_lasttoken", "last", True),
        ("bert", None, "mean", True),
        ("llama", None, "last", True),
    ],
)
def test_a_batch_gets_the_vectors_of_its_texts(
    kind: str, file_mode: str | None, mode: str, normalize: bool, tmp_path: Path
) -> None:
    path = checkpoint(kind, tmp_path)
    if file_mode is not None:
        sentence_transformer(path, file_mode, normalize)
    pipeline = EmbeddingsPipeline.load(path, dtype="float32", max_batch_tokens=150)
    assert pipeline.pooling == Pooling(mode, normalize)  # type: ignore[arg-type]
    tokens = texts(9)
    batch = contexts(tokens)
    halves: list[dict[RequestID, EmbeddingsContext]] = [{}, {}]
    for i, (name, context) in enumerate(batch.items()):
        halves[i % 2][name] = context
    outputs = pipeline.execute(EmbeddingsGenerationInputs(halves))
    assert outputs.keys() == batch.keys()
    for name, vector in zip(batch, expected(path, tokens, mode, normalize), strict=True):
        assert outputs[name].embeddings.dtype == np.float32
        np.testing.assert_allclose(outputs[name].embeddings, vector, rtol=1e-4, atol=1e-4)
    generator = PipelineEmbeddingsGenerator(pipeline)
    assert isinstance(generator, EmbeddingsGenerator)
    again = generator.encode(batch)
    np.testing.assert_allclose(again[RequestID("3")].embeddings, outputs[RequestID("3")].embeddings, atol=1e-4)
    assert pipeline.execute(EmbeddingsGenerationInputs([])) == {}


def test_the_caller_may_say_how_to_pool(tmp_path: Path) -> None:
    path = sentence_transformer(checkpoint("bert", tmp_path), "pooling_mode_mean_tokens", True)
    tokens = texts(3)
    pipeline = EmbeddingsPipeline.load(path, dtype="float32", pooling=Pooling("last", normalize=False))
    outputs = pipeline.execute(EmbeddingsGenerationInputs([contexts(tokens)]))
    for i, vector in enumerate(expected(path, tokens, "last", False)):
        np.testing.assert_allclose(outputs[RequestID(str(i))].embeddings, vector, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_embedded_is_refused_by_name(tmp_path: Path) -> None:
    pipeline = EmbeddingsPipeline.load(checkpoint("bert", tmp_path), dtype="float32")
    for tokens, complaint in (([5] * 65, "request 0 has 65 tokens; this model takes 64"), ([VOCAB], "outside 0..96")):
        with pytest.raises(ValueError, match=complaint):
            pipeline.execute(EmbeddingsGenerationInputs([contexts([np.array(tokens)])]))


@pytest.mark.parametrize(
    ("mode", "extra", "complaint"),
    [
        ("pooling_mode_mean_tokens", "Dense", "has a Dense layer"),
        ("pooling_mode_weightedmean_tokens", "", "asks for pooling_mode_weightedmean_tokens"),
        ("pooling_mode_max_tokens", "", "asks for pooling_mode_max_tokens"),
    ],
)
def test_checkpoints_that_pool_otherwise_are_refused(mode: str, extra: str, complaint: str, tmp_path: Path) -> None:
    path = sentence_transformer(checkpoint("bert", tmp_path), mode, False, extra)
    with pytest.raises(ModelRefused, match=complaint):
        EmbeddingsPipeline.load(path)


def test_a_checkpoint_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    path = checkpoint("bert", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelRefused, match=r"lacks 16 of its weights, such as encoder\.layer\.3"):
        EmbeddingsPipeline.load(path)
