"""Models with recurrent layers give the tokens and log-probabilities of transformers, whatever a pass looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_worker.batch import ForwardBatch
from model_worker.loading.load import load_model
from model_worker.loading.verify import largest_error, median_error
from model_worker.model import ModelRefused
from model_worker.pooling.load import load_pooling
from model_worker.pooling.texts import Texts
from model_worker.recurrent.families import proven_names
from model_worker.runner import ModelRunner
from tests.model_worker.recurrent.naive_mamba import compute_naively
from tests.model_worker.recurrent.recorded import recording
from tests.model_worker.recurrent.tiny_hybrids import HYBRIDS, tiny_hybrid
from tests.model_worker.test_runner import BLOCK_SIZE, NEW_TOKENS, Driver, load
from tests.model_worker.tiny_models import VOCAB

PROMPTS = 7


def prompts(rng: np.random.Generator) -> list[list[int]]:
    """Some of one token, and one that is longer than the pieces of every kind of mixer."""
    lengths = [1, 2, *rng.integers(3, 40, PROMPTS - 3), 90]
    return [[int(token) for token in rng.integers(3, VOCAB, length)] for length in lengths]


def reference(path: Path) -> Any:
    """transformers' model. The Mambas of Nemotron-H, where transformers limits time steps in prompts as no other code
    does (docs/checkpoints.md), are computed token by token from their definition."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    if model.config.model_type == "nemotron_h":
        compute_naively(model, tuple(model.config.time_step_limit))
    return model


def generated(model: Any, texts: list[list[int]]) -> list[list[int]]:
    # What is computed naively keeps no state.
    more = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "use_cache": model.config.model_type != "nemotron_h"}
    answers = (model.generate(torch.tensor([text]), **more) for text in texts)
    return [answer[0, -NEW_TOKENS:].tolist() for answer in answers]


def test_every_served_architecture_is_compared() -> None:
    assert proven_names() == ", ".join(sorted(HYBRIDS))


@pytest.mark.parametrize("arch", HYBRIDS)
def test_greedy_tokens_equal_generate(
    arch: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where decode steps are recorded, as on a GPU."""
    rng = np.random.default_rng()
    path = tiny_hybrid(arch, tmp_path_factory.getbasetemp())
    model = reference(path)
    texts = prompts(rng)
    expected = generated(model, texts)
    assert len({token for text in expected for token in text}) > 15, "the random model repeats itself"
    loaded = load(path)
    assert loaded.recurrent is not None
    blocks = sum(-(-(len(text) + NEW_TOKENS) // BLOCK_SIZE) for text in texts)
    assert Driver(ModelRunner(loaded, blocks, BLOCK_SIZE), texts, rng).run() == expected
    recorded, replays = recording(loaded, blocks, PROMPTS, monkeypatch)
    assert Driver(recorded, texts, rng).run() == expected
    assert len(replays) > NEW_TOKENS // 2, "few steps were decode steps"


@torch.inference_mode()
def test_time_steps_of_nemotron_h(tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers limits them in prompts; texts that are generated and those that are pooled have none."""
    path = tiny_hybrid("nemotron_h", tmp_path_factory.getbasetemp())
    tokens = torch.from_numpy(np.random.default_rng().integers(3, VOCAB, 50))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    own = model(tokens[None]).logits[0]
    limited: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    compute_naively(limited, (model.config.time_step_min, float("inf")))
    assert largest_error(limited(tokens[None]).logits[0], own) < 1e-4
    unlimited = reference(path)
    want = unlimited(tokens[None]).logits[0]
    assert largest_error(want, own) > 1e-3
    generating = ModelRunner(load(path), 32, BLOCK_SIZE).backend.logits(one(tokens.tolist(), 0, 0))
    assert largest_error(generating, want) < 1e-4
    pooled = load_pooling(path).backbone(Texts(tokens, (20, 30)))
    states = [unlimited.model(text[None]).last_hidden_state[0] for text in tokens.split((20, 30))]
    assert largest_error(pooled, torch.cat(states)) < 1e-4


def test_a_limit_of_time_steps_is_refused(tmp_path: Path) -> None:
    path = tiny_hybrid("bamba", tmp_path, time_step_limit=[0.01, 1.0])
    with pytest.raises(ModelRefused, match=r"time_step_limit \[0\.01, 1\.0\], which transformers applies to prompts"):
        load(path)


@pytest.mark.parametrize("arch", ["lfm2", "falcon_h1"])
def test_half_precision(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tiny_hybrid(arch, tmp_path_factory.getbasetemp())
    backend = ModelRunner(load_model(path, "bfloat16", "cpu", lambda *_: None), 32, BLOCK_SIZE).backend
    text = [int(token) for token in np.random.default_rng().integers(3, VOCAB, 30)]
    pieces = torch.cat([backend.logits(one(text[:end], first, 0)) for first, end in ((0, 11), (11, 12), (12, 30))])
    with torch.inference_mode():
        assert median_error(pieces, reference(path)(torch.tensor([text])).logits[0]) < 0.045


def one(tokens: list[int], first: int, row: int) -> ForwardBatch:
    """A pass over tokens of one row from index `first` on."""
    count = len(tokens) - first
    table = np.arange(16)[None] + 16 * row
    whole = np.array([len(tokens)])
    every = np.arange(count)
    return ForwardBatch.build(
        np.array(tokens[first:]), np.array([count]), whole, table, BLOCK_SIZE, every, rows=np.array([row])
    )


def test_weights_and_keys_in_eight_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tiny_hybrid("qwen3_5_text", tmp_path_factory.getbasetemp())
    loaded = load_model(path, "float32", "cpu", lambda *_: None, quantization="int8", kv_dtype="int8")
    backend = ModelRunner(loaded, 32, BLOCK_SIZE).backend
    text = [int(token) for token in np.random.default_rng().integers(3, VOCAB, 30)]
    whole = backend.logits(one(text, 0, 0)).clone()
    pieces = torch.cat([backend.logits(one(text[:end], first, 1)) for first, end in ((0, 11), (11, 12), (12, 30))])
    assert median_error(pieces, whole) < 1e-4
    assert median_error(whole, reference(path)(torch.tensor([text])).logits[0]) < 0.09


def test_a_row_that_begins_knows_nothing_of_its_predecessor(tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng()
    backend = ModelRunner(load(tiny_hybrid("qwen3_next", tmp_path_factory.getbasetemp())), 32, BLOCK_SIZE).backend
    text, other = ([int(token) for token in rng.integers(3, VOCAB, 20)] for _ in range(2))
    fresh = backend.logits(one(text, 0, 0)).clone()
    backend.logits(one(other, 0, 1))
    assert torch.equal(backend.logits(one(text, 0, 1)), fresh)


def test_a_state_is_not_used_for_other_tokens_than_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No answer comes of a beginning that was taken from elsewhere, or of a token that was taken back."""
    backend = ModelRunner(load(tiny_hybrid("lfm2", tmp_path_factory.getbasetemp())), 32, BLOCK_SIZE).backend
    text = list(range(3, 23))
    backend.logits(one(text[:12], 0, 0))
    for first in (8, 16):
        with pytest.raises(RuntimeError, match=rf"row 0 goes on behind {first} tokens, and .* stands for 12"):
            backend.logits(one(text, first, 0))
    backend.logits(one(text, 12, 0))
