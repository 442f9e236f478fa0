"""Packed and padded texts, against transformers run text by text in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForTextEncoding

from interfaces import PoolingContext, PoolingTask
from model_worker.model import ModelRefused
from model_worker.pooling.load import load_pooling
from model_worker.pooling.pooler import Pooler
from model_worker.pooling.texts import passes
from tests.model_worker.pooling.tiny_encoders import CONFIGS, DECODERS, FUSED, PADDED, random_texts, save


def states(path: Path, texts: list[NDArray[np.int32]]) -> list[NDArray[np.float64]]:
    """The last hidden states of each text as transformers computes them."""
    auto: Any = AutoModelForTextEncoding if "t5" in (path / "config.json").read_text() else AutoModel
    model = auto.from_pretrained(path).eval()
    with torch.no_grad():
        outputs = [model(input_ids=torch.tensor([text.tolist()])) for text in texts]
    return [output.last_hidden_state[0].double().numpy() for output in outputs]


def embed(pooler: Pooler, texts: list[NDArray[np.int32]], **options: Any) -> NDArray[np.float32]:
    return pooler.run(PoolingContext.of(texts, PoolingTask.EMBED, **options))[0]


def assert_close(got: NDArray[Any], want: NDArray[Any], tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_texts_get_the_states_of_texts_alone(name: str, tmp_path: Path) -> None:
    path = save(name, tmp_path)
    pooler = load_pooling(path, dtype="float32", max_batch_tokens=150)
    assert ("padded" in pooler.backend) == (name in PADDED), pooler.backend
    assert ("fused" in pooler.backend) == (name in FUSED), pooler.backend
    assert pooler.tasks == {PoolingTask.EMBED, PoolingTask.EMBED_TOKENS}
    texts = random_texts(9)
    want = states(path, texts)
    values, rows = pooler.run(PoolingContext.of(texts, PoolingTask.EMBED_TOKENS, normalize=False))
    assert rows.tolist() == [len(text) for text in texts]
    assert_close(values, np.concatenate(want), 3e-5)
    # Without modules.json a decoder's last token counts, and an encoder's mean.
    vectors = [each[-1] if name in DECODERS else each.mean(0) for each in want]
    assert_close(embed(pooler, texts, normalize=False), np.array(vectors), 3e-5)
    unit = np.array([vector / np.linalg.norm(vector) for vector in vectors])
    assert_close(embed(pooler, texts), unit)
    alone = np.concatenate([embed(pooler, [text]) for text in texts])
    assert_close(embed(pooler, texts), alone)


def test_vectors_are_cut_before_they_are_normalized(tmp_path: Path) -> None:
    pooler = load_pooling(save("bert", tmp_path))
    texts = random_texts(3)
    whole = embed(pooler, texts, normalize=False)[:, :7]
    assert_close(embed(pooler, texts, dimensions=7), whole / np.linalg.norm(whole, axis=1, keepdims=True))


def test_texts_that_a_model_cannot_compute_are_refused_by_name(tmp_path: Path) -> None:
    pooler = load_pooling(save("roberta", tmp_path))
    assert (pooler.max_model_len, pooler.hidden_size, pooler.dtype) == (200, 48, "float32")
    for texts, options, complaint in (
        ([[5], [5] * 201], {}, "text 1 has 201 tokens; RobertaModel takes at most 200: truncate it"),
        ([[151]], {}, "token id 151 is outside of the vocabulary: ids are 0 to 150"),
        ([[5]], {"dimensions": 49}, "dimensions must be at most 48, the width of a vector, got 49"),
    ):
        with pytest.raises(ValueError, match=complaint):
            pooler.run(PoolingContext.of(texts, PoolingTask.EMBED, **options))
    with pytest.raises(ValueError, match="task 'classify' is not what RobertaModel does: it does embed, embed_tokens"):
        pooler.run(PoolingContext.of([[5]], PoolingTask.CLASSIFY))


def test_a_checkpoint_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    import json

    path = save("bert", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(
        ModelRefused, match=r"task embed: the checkpoint lacks 16 of its weights, such as encoder\.layer\.3"
    ):
        load_pooling(path)
    with pytest.raises(ModelRefused, match="task classify: the checkpoint lacks"):
        load_pooling(path, task="classify")


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = save("bert", tmp_path)
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 200 positions, got 201"):
        load_pooling(path, max_model_len=201)
    with pytest.raises(ValueError, match="task 'generate' is not one that pools"):
        load_pooling(path, task="generate")
    with pytest.raises(ValueError, match="dtype 'int4' is unknown"):
        load_pooling(path, dtype="int4")


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_half_precision_and_int8_keep_the_direction_of_vectors(name: str, tmp_path: Path) -> None:
    # One draw: how far rounding turns the vectors of a random model depends on its weights, and some are refused.
    torch.manual_seed(3)
    path = save(name, tmp_path)
    texts = random_texts(5)
    want = embed(load_pooling(path, dtype="float32"), texts)
    for options, least in (({"dtype": "bfloat16"}, 0.99), ({"quantization": "int8"}, 0.995)):
        pooler = load_pooling(path, **options)  # type: ignore[arg-type]
        cosines = (embed(pooler, texts) * want).sum(1)
        assert cosines.min() > least, (options, cosines)
    assert pooler.backend.endswith("int8 weights")


def test_a_half_precision_checkpoint_is_computed_in_float32_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save("bert", tmp_path)
    AutoModel.from_pretrained(path).to(torch.bfloat16).save_pretrained(path)
    for fast, dtype in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr("model_worker.pooling.load.multiplies_bfloat16", lambda fast=fast: fast)
        assert load_pooling(path).dtype == dtype


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 100))
def test_passes_hold_each_text_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    column = np.array(lengths, np.int32)
    found = list(passes(column, budget))
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    assert all(column[places].sum() <= budget or len(places) == 1 for places in found)
    assert all(len(places) for places in found)
    order = column[np.concatenate(found)]
    assert (np.diff(order) <= 0).all()


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory: pytest.TempPathFactory) -> Pooler:
    return load_pooling(save("modernbert", tmp_path_factory.mktemp("modernbert")))


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    budget=st.integers(20, 200),
    seed=st.integers(0, 2**31),
)
def test_a_text_does_not_depend_on_its_neighbours(
    modernbert: Pooler, lengths: list[int], budget: int, seed: int
) -> None:
    import dataclasses

    rng = np.random.default_rng(seed)
    texts = [rng.integers(4, 151, length).astype(np.int32) for length in lengths]
    pooler = dataclasses.replace(modernbert, max_batch_tokens=budget)
    together = embed(pooler, texts)
    alone = np.concatenate([embed(pooler, [text]) for text in texts])
    assert_close(together, alone)
