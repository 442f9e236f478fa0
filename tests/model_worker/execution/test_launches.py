"""What surrounds a recorded step on a GPU: a few launches and one copy, whatever its rows ask for.

Counted on the CPU with kernels that are interpreted, and on tensors without values that are as wide as a model's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from interfaces import LogprobMode, SamplingParams
from model_worker import batch as batches
from model_worker.cuda.graphs import DecodeBuffers, DecodeGraphs
from model_worker.device_copy import HostRing
from model_worker.execution import overlap_cuda
from model_worker.grammar.apply_mask import apply_masks
from model_worker.grammar.masks import Masks
from model_worker.loading.load import load_model
from model_worker.sampling import ahead, device_draw, device_penalties, sampler, scaling, token_rules
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import TritonDraw
from model_worker.sampling.sampler import SamplerRows
from tests.model_worker.cuda.fake_gpu import DEVICE, fake_gpu
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import counted_launches
from tests.model_worker.execution.tiny_worker import BLOCK_SIZE, BLOCKS_PER_ROW, ROWS, TinyWorker, join
from tests.model_worker.sampling.test_ahead import assert_alike
from tests.model_worker.tiny_models import VOCAB, tiny_model

need_triton()

PROMPT = [5, 9, 3]
GREEDY = ["extremes_kernel", "finish_kernel"]
DRAWN = ["extremes_kernel", "edge_kernel", "pick_kernel", "finish_kernel"]
# What rows ask for, and what is launched behind a recording.
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "greedy": ({"temperature": 0.0}, GREEDY),
    "drawn": ({"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, DRAWN),
    "penalised": ({"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2}, DRAWN),
    "penalised greedy": ({"temperature": 0.0, "presence_penalty": 0.5}, GREEDY),
    "biased": ({"temperature": 0.8, "logit_bias": {5: 1.0}}, DRAWN),
    "ruled greedy": ({"temperature": 0.0, "allowed_token_ids": [8, 9, 10], "bad_words": [[9]]}, GREEDY),
    "at least so many": ({"temperature": 0.8, "min_new_tokens": 4, "stop_token_ids": [7]}, DRAWN),
    "log-probabilities": ({"temperature": 0.0, "logprobs": LogprobMode.TEMPERED, "top_logprobs": 5}, GREEDY),
    "log-probabilities of what is kept": (
        {"temperature": 0.7, "top_p": 0.9, "logprobs": LogprobMode.WARPED, "top_logprobs": 5, "logprob_ids": (1, 2)},
        DRAWN,
    ),
}
KINDS["all of them"] = ({name: value for params, _ in KINDS.values() for name, value in params.items()}, DRAWN)
MOST_AROUND = 5
# Modules that send something to a device.
SENDERS: tuple[ModuleType, ...] = (
    *(batches, overlap_cuda, ahead, device_draw, device_penalties, sampler, scaling, token_rules),
)


class EvenTokens:
    """Masks of all rows: only tokens with an even number."""

    def constrain(self, rows: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), np.bool_)

    def of(self, rows: np.ndarray) -> tuple[RowMasks, dict[int, str]]:
        words = np.full((len(rows), -(-VOCAB // 32)), 0x55555555, np.int32)
        return RowMasks(np.arange(len(rows)), words), {}

    def apply(self, logits: Tensor, rows: np.ndarray) -> dict[int, str]:
        apply_masks(logits, *self.of(rows)[0])
        return {}

    def flush(self) -> None:
        """Nothing is sent anywhere."""

    def sampled(self, rows: np.ndarray, tokens: np.ndarray) -> dict[int, list[int]]:
        assert not (tokens % 2).any()
        return {}


class Counted:
    """A worker whose decode steps are recorded, and counts of its launches and copies."""

    def __init__(self, worker: TinyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker = worker
        self.names: list[str] = []
        self.copies = self.of_steps = 0
        for module in SENDERS:
            for name in {"upload", "upload_together"} & set(vars(module)):
                monkeypatch.setattr(module, name, self._counting(getattr(module, name)))

        places = BLOCKS_PER_ROW, BLOCK_SIZE, ROWS * BLOCKS_PER_ROW, torch.device("cpu"), True
        worker.backend._graphs = DecodeGraphs(worker.backend._forward, DecodeBuffers(ROWS, *places), self._recorder)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.copies += 1
            return function(*arguments)

        return counted

    def _recorder(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A replay is one launch, and copies nothing."""

        def replay() -> Tensor:
            before, copies = len(self.names), self.copies
            logits = function()
            self.names[before:] = ["replay"]
            self.copies = copies
            return logits

        return replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    loaded = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    return replace(loaded, attention_name="triton", has_kernels=True)


def run(model: Any, params: dict[str, Any], masks: EvenTokens | None, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Run two steps of two rows, and compare their tokens with those of a worker that waits for each."""
    worker, plain = TinyWorker(model, "cuda"), TinyWorker(model)
    worker.shared.sampler.use_kernels(TritonDraw(torch.device("cpu"), model.vocab_size))
    for each in (worker, plain):
        rows = [join(row, PROMPT[row:], SamplingParams(seed=row, **params)) for row in range(2)]
        each.prefill(*rows)
        each.shared.masks = cast(Masks, masks)
    counted = Counted(worker, monkeypatch)
    with counted_launches(monkeypatch) as launches:
        launches.names = counted.names
        counted.copies = 0
        launched = [worker.begin([0, 1]) for _ in range(2)]
        counted.of_steps = counted.copies
        results = [pending.result() for pending in launched]
        assert counted.copies == counted.of_steps
    assert worker.taken == ["OverlapCuda"] * 2
    for result in results:
        want = plain.begin([0, 1]).result()
        assert result.tokens.tolist() == want.tokens.tolist()
        assert (result.reports is None) == (want.reports is None)
        if result.reports is not None and want.reports is not None:
            assert_alike(result.reports, want.reports)
    return counted


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_few_launches_around_its_recording(kind: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns go to the device in one copy, and a step whose tokens are not read yet has no more of either."""
    params, behind = KINDS[kind]
    counted = run(model, params, None, monkeypatch)
    assert counted.names == ["fill_decode_kernel", "replay", *behind] * 2
    assert len(behind) + 1 <= MOST_AROUND
    assert counted.of_steps == 2


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalised", "ruled greedy", "all of them"])
def test_masks_of_grammars_are_read_where_the_host_has_them(
    kind: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not known when the pass is launched, and what else the draw takes has gone along with its columns."""
    params, behind = KINDS[kind]
    counted = run(model, params, EvenTokens(), monkeypatch)
    assert counted.names == ["fill_decode_kernel", "replay", *behind] * 2
    assert counted.of_steps == 2


def test_rules_that_a_mask_leaves_no_token_give_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the allowed tokens none is even: the kernel finds this, and nothing is sent anew."""
    params, behind = {"temperature": 0.0, "allowed_token_ids": [9, 11]}, GREEDY
    counted = run(model, params, EvenTokens(), monkeypatch)
    assert counted.names == ["fill_decode_kernel", "replay", *behind] * 2
    assert counted.of_steps == 2


WIDTH = 151_936
MANY = 256


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_at_a_models_size_waits_for_nothing(kind: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no wide float64 tensor of its rows, and no copy but that of masks to where kernels read them."""
    sent = []

    def send(array: np.ndarray, device: torch.device) -> Tensor:
        sent.append(array.shape)
        return torch.empty(array.shape, dtype=dtypes[array.dtype], device=device)

    dtypes = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float32")}
    senders = {"upload": send, "upload_together": lambda arrays, device: [send(array, device) for array in arrays]}
    for module in SENDERS:
        for name in set(senders) & set(vars(module)):
            monkeypatch.setattr(module, name, senders[name])
    monkeypatch.setattr(HostRing, "lent", lambda _, words: nullcontext(torch.empty(words.shape, dtype=torch.int32)))
    params, behind = KINDS[kind]
    with fake_gpu(monkeypatch):
        rows = SamplerRows(MANY, WIDTH, DEVICE)
        kernels = TritonDraw(DEVICE, WIDTH)
        # The memory of earlier steps.
        kernels._room(MANY)
        rows.use_kernels(kernels)
        text = np.arange(9, dtype=np.int32)
        for row in range(MANY):
            rows.join(row, SamplingParams(seed=row, **(params if row < 5 else {"temperature": 0.0})), [], text, text)
        logits = torch.empty(MANY, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        masks = RowMasks(np.arange(3), np.zeros((3, WIDTH // 32), np.int32)) if masked else None
        held, positions = np.arange(MANY, dtype=np.int32), np.full(MANY, 18)
        there = [send(array, DEVICE) for array in rows.arrays(held, positions, masks)]
        last_tokens = torch.zeros(MANY, dtype=torch.int64, device=DEVICE)
        sent.clear()
        with counted_launches(monkeypatch, run=False, wide=WIDTH - 1) as launches:
            drawn = rows.sample_ahead(logits, held, positions, there, masks, last_tokens)
    assert drawn.tokens.shape == (MANY,)
    assert not launches.wide_doubles
    assert launches.names == behind
    assert not sent
