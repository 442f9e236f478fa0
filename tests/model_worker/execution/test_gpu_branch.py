"""All that a GPU's worker does, on the CPU: steps in flight, recorded steps, fused layers, attention and draw by
kernels. Tokens and reports are those of plain torch, of steps one by one, and of the host's draw.

Kernels are interpreted, and a replay calls what was to be recorded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interfaces import Join, LogprobMode, SamplingParams, StepResult
from model_worker.attention import cuda
from model_worker.backends import modules
from model_worker.cuda.encoded_experts import GroupedExperts
from model_worker.execution.flight import Pending
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.sampling.draw_triton import TritonDraw
from tests.model_worker.cuda.flash_attention import flash_attention
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.on_gpu import load_gpt_oss
from tests.model_worker.cuda.test_capture import FUSED, load
from tests.model_worker.execution.tiny_worker import BLOCK_SIZE, BLOCKS_PER_ROW, ROWS, TinyWorker, join
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.model_worker.sampling.test_ahead import assert_alike
from tests.model_worker.tiny_models import VOCAB, tiny_model

need_triton()

# And their layers: two where these differ.
FAMILIES = {"llama": 1, "qwen3": 1, "gemma3_text": 2, "mistral": 1, "gpt_oss": 2, "mixtral": 1, "deepseek_v3": 2}
# What rows ask for, one each.
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    {"temperature": 0.0, "logprobs": LogprobMode.TEMPERED, "top_logprobs": 3},
    {"temperature": 0.8, "min_p": 0.01, "logprobs": LogprobMode.WARPED, "top_logprobs": 4, "logprob_ids": (7,)},
)
# Tokens of prompts: windows cut the longest, and the last one comes in two parts, of which one is beside decode rows.
LENGTHS = (3, 13, 4, 5)
PARTS = (6, 4)
LATE = len(LENGTHS)
DECODES = 2
MOST_TOKENS = 32


class Replays:
    """A recorder that calls again, and the number of replays by the recorded function."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        kind = "mixed" if "MixedGraphs" in function.__qualname__ else "decode"

        def replay() -> Tensor:
            self.counts[kind] += 1
            return function()

        return replay


def again(worker: TinyWorker) -> list[Pending]:
    """Launch decode steps of all rows."""
    return [worker.begin(range(len(WISHES))[::-1]) for _ in range(DECODES)]


def launched(worker: TinyWorker, joins: list[Join]) -> list[StepResult]:
    """Launch prompts, decode rows beside the rest of a prompt, and decode steps. A step is launched before the one
    before is read."""
    rows = list(range(len(joins)))
    steps: list[tuple[list[int], list[int] | None, list[Join]]] = [
        (rows, [*LENGTHS, PARTS[0]], joins),
        (rows, [1] * LATE + [PARTS[1]], []),
    ]
    pending = [*[worker.begin(*step) for step in steps], *again(worker)]
    return [each.result() for each in pending]


def asking(prompts: list[list[int]], rng: np.random.Generator) -> list[Join]:
    seeds = rng.integers(1 << 40, size=len(prompts)).tolist()
    values = [SamplingParams(seed=seed, **wishes) for seed, wishes in zip(seeds, WISHES, strict=True)]
    return [join(row, prompt, params) for row, (prompt, params) in enumerate(zip(prompts, values, strict=True))]


def recording(loaded: LoadedModel, block_size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[TinyWorker, Replays]:
    """Make a worker as a GPU has it, whose steps are recorded."""
    replays = Replays()
    monkeypatch.setattr(modules, "CudaRecorder", lambda: replays)
    worker = TinyWorker(loaded, "cuda", block_size=block_size)
    worker.shared.sampler.use_kernels(TritonDraw(torch.device("cpu"), loaded.vocab_size))
    worker.backend.record(ROWS, BLOCKS_PER_ROW * block_size, MOST_TOKENS, ROWS * BLOCKS_PER_ROW)
    assert worker.backend.records
    replays.counts.clear()
    return worker, replays


def assert_same(got: list[StepResult], want: list[StepResult]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.rows.tolist() == other.rows.tolist()
        assert one.tokens.tolist() == other.tokens.tolist()
        assert_alike(one.reports, other.reports)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_plain_torch(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of gpt-oss are multiplied in MXFP4, and in plain torch they are decoded."""
    if family == "gpt_oss":
        loaded = load_gpt_oss(tmp_path_factory.getbasetemp(), tmp_path)
        assert sum(isinstance(module, GroupedExperts) for module in loaded.model.modules()) == 2 * FAMILIES[family]
        decoded = load_model(tmp_path / "exact", "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    else:
        loaded = decoded = load(family, tmp_path_factory.getbasetemp(), FAMILIES[family])
    assert (loaded.layers is not None) == (family in FUSED)
    plain = TinyWorker(replace(decoded, layers=None, attention_name="reference"))
    worker, replays = recording(loaded, BLOCK_SIZE, monkeypatch)
    rng = np.random.default_rng()
    joins = asking([rng.integers(3, VOCAB, length).tolist() for length in (*LENGTHS, sum(PARTS))], rng)
    assert_same(launched(worker, joins), launched(plain, joins))
    assert set(worker.taken) == {"OverlapCuda"}
    assert replays.counts == {"mixed": 2, "decode": DECODES}


def test_tokens_of_a_model_with_recurrent_layers(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decode steps are recorded, and those with prompts are not. A layer attends and keeps a state."""
    path = tiny_hybrid("falcon_h1", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    loaded = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    loaded = replace(loaded, attention_name="triton", has_kernels=True)
    plain = TinyWorker(replace(loaded, attention_name="reference"))
    worker, replays = recording(loaded, BLOCK_SIZE, monkeypatch)
    rng = np.random.default_rng()
    joins = asking([rng.integers(3, VOCAB, length).tolist() for length in (*LENGTHS, sum(PARTS))], rng)
    assert_same(launched(worker, joins), launched(plain, joins))
    assert set(worker.taken) == {"OverlapCuda"}
    assert replays.counts == {"decode": DECODES}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_tokens_equal_those_of_plain_torch_with_torchs_attention(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, which that attention wants, so a rounding may change a token: the random numbers are always the
    same. Prompts end around the edge of a block."""
    path = tiny_model(family, tmp_path_factory.getbasetemp(), head_dim=16, max_position_embeddings=1024)
    loaded = load_model(path, "bfloat16", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    loaded = replace(loaded, attention_name="cuda", block_size=cuda.BLOCK_SIZE, has_kernels=True)
    plain = TinyWorker(replace(loaded, attention_name="reference"), block_size=cuda.BLOCK_SIZE)
    worker, replays = recording(loaded, cuda.BLOCK_SIZE, monkeypatch)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (5, 255, 256, 300, 1)]
    joins = asking(prompts, rng)
    with flash_attention():
        got, want = (
            [each.result() for each in [one.begin(range(5), [len(p) for p in prompts], joins), *again(one)]]
            for one in (worker, plain)
        )
    assert_same(got, want)
    assert set(worker.taken) == {"OverlapCuda"}
    assert replays.counts == {"decode": DECODES}
