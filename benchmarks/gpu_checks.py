"""Whether a GPU's kernels and recorded steps are right, case by case: in processes side by side, as each compiles.

Attention against plain torch for shapes and options; tiny models of many architectures against transformers in float32
on the CPU. Knows cases and their judges; does not know the hour that asks for them.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_worker.attention import attention_backend, reference, triton
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVCache, KVLayout, LayerShape
from model_worker.loading.gpu_attention import TOLERANCE, batches, random_values, relative_error
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner

Figures = dict[str, Any]
PROCESSES = 8
# Of the checked models: prompts around the edges of blocks, and the steps that follow them.
PROMPTS = (1, 16, 37, 90)
STEPS = 12
LONGEST = 128

_Case = TypeVar("_Case")
_Found = TypeVar("_Found")


def side_by_side(work: Callable[[_Case], _Found], cases: Sequence[_Case], apart: bool) -> list[_Found]:
    """Return what `work` finds for each case, in processes of their own if `apart`."""
    if not apart:
        return [work(case) for case in cases]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, cases))


@dataclass(frozen=True)
class AttentionCase:
    """One shape of attention layers, with or without a window, a soft cap and sinks."""

    device: str
    dtype: torch.dtype
    k_dim: int
    v_dim: int
    page: int
    rich: bool
    kinds: tuple[str, ...] = ("decode rows", "prompts", "mixed rows")


def attention_case(case: AttentionCase) -> list[tuple[str, float, bool]]:
    """Compare the kernels with plain torch: for each kind of batch its name, the error, and whether it is too large."""
    device = torch.device(case.device)
    groups, kv_heads = (16, 1) if case.k_dim > 256 else (4, 2)
    shape = LayerShape(kv_heads, case.k_dim, case.v_dim)
    window, softcap = (40, 20.0) if case.rich else (None, None)
    sinks = random_values((kv_heads * groups,), device) if case.rich else None
    params = AttentionParams(case.k_dim**-0.5, window, softcap, sinks)
    cache = KVCache(KVLayout((shape,), case.dtype), 8 * -(-(triton.PIECE + 3) // case.page), case.page, device)
    for blocks in (cache.k[0], cache.v[0]):
        blocks.copy_(random_values(blocks.shape, device))
    attend = attention_backend("triton", device)
    found = []
    for kind, batch in batches(case.page, cache.num_blocks, device):
        if kind in case.kinds:
            q = random_values((batch.num_tokens, kv_heads * groups, case.k_dim), device).to(case.dtype)
            want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
            error = relative_error(attend(q, cache.k[0], cache.v[0], batch, params), want)
            name = f"{kind}, heads {case.k_dim}/{case.v_dim}, page {case.page}, window {window}"
            found.append((name, error, not error < TOLERANCE[case.dtype]))
    return found


@dataclass(frozen=True)
class ModelCase:
    """A model in a folder, and the device that must compute it."""

    name: str
    folder: Path
    device: str


def model_case(case: ModelCase) -> Figures:
    """Serve a model on the device: what serves it, whether steps are recorded, and how its tokens compare.

    In float32 greedy tokens are judged by transformers on the CPU, given the same tokens before. In bfloat16 the logits
    of recorded steps must have the bits of steps that are launched one by one.
    """
    began, notes = time.perf_counter(), _Notes()
    logging.getLogger().addHandler(notes)
    try:
        with torch.inference_mode():
            found = {**_against_transformers(case), **_recorded(case)}
    except Exception as error:  # the next model may work
        found = {"failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        logging.getLogger().removeHandler(notes)
    if notes.texts:
        found["log"] = notes.texts
    return {"model": case.name, **found, "seconds": round(time.perf_counter() - began, 1)}


class _Notes(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage()[:300])


class _Rows:
    """The sequences of a check, each with blocks of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._size, self._device = loaded.block_size, loaded.device
        self.width = -(-LONGEST // self._size)
        count = len(PROMPTS)
        self.tables = np.random.default_rng(0).permutation(count * self.width).reshape(count, self.width)
        self.lens = np.array(PROMPTS)

    def prompts(self, tokens: Sequence[NDArray[np.int64]]) -> ForwardBatch:
        last = np.cumsum(self.lens) - 1
        return self._batch(np.concatenate(tokens), self.lens, self.lens, last)

    def decode(self, tokens: NDArray[np.int64], step: int) -> ForwardBatch:
        """Make the step after `step` others."""
        count = len(self.lens)
        return self._batch(tokens, np.ones(count, np.int64), self.lens + step + 1, np.arange(count))

    def _batch(self, tokens: Any, queries: Any, lens: Any, wanted: Any) -> ForwardBatch:
        return ForwardBatch.build(tokens, queries, lens, self.tables, self._size, wanted, self._device)


def _runner(loaded: LoadedModel, rows: _Rows) -> ModelRunner:
    runner = ModelRunner(loaded, len(PROMPTS) * rows.width, loaded.block_size)
    runner.warm_up()
    runner.record(len(PROMPTS), LONGEST, 2 * LONGEST)
    return runner


def _prompts(loaded: LoadedModel) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, loaded.vocab_size, length) for length in PROMPTS]


def _against_transformers(case: ModelCase) -> Figures:
    loaded = load_model(case.folder, "float32", case.device, lambda *_: None)
    rows = _Rows(loaded)
    runner, prompts = _runner(loaded, rows), _prompts(loaded)
    logits = [runner.backend.logits(rows.prompts(prompts)).float().cpu()]
    for step in range(STEPS):
        logits.append(runner.backend.logits(rows.decode(logits[-1].argmax(-1).numpy(), step)).float().cpu())
    got = torch.stack(logits, 1)
    auto: Any = AutoModelForCausalLM
    judge = auto.from_pretrained(case.folder, dtype=torch.float32).eval()
    want = torch.stack([_judged(judge, prompt, own) for prompt, own in zip(prompts, got.argmax(-1), strict=True)])
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).max()
    return {
        "attention": runner.attention_name,
        "greedy as transformers": round(float((got.argmax(-1) == want.argmax(-1)).float().mean()), 4),
        "largest error float32": float(error),
    }


def _judged(judge: Any, prompt: NDArray[np.int64], own: Tensor) -> Tensor:
    """Return transformers' logits [steps, vocabulary] behind a prompt and the tokens that we took after it."""
    tokens = torch.cat([torch.from_numpy(prompt), own[:-1]])
    result: Tensor = judge(input_ids=tokens[None]).logits[0, len(prompt) - 1 :].float()
    return result


def _recorded(case: ModelCase) -> Figures:
    """Compare recorded steps in bfloat16 with the same steps launched one by one, on the same cache."""
    loaded = load_model(case.folder, "bfloat16", case.device, lambda *_: None)
    rows = _Rows(loaded)
    runner, prompts = _runner(loaded, rows), _prompts(loaded)
    plain = ModelRunner(loaded, runner.num_blocks, loaded.block_size, cache=runner.cache)
    tokens = runner.backend.logits(rows.prompts(prompts)).argmax(-1).cpu().numpy()
    equal = []
    for step in range(STEPS):
        batch = rows.decode(tokens, step)
        recorded = runner.backend.logits(batch).clone()
        equal.append(torch.equal(plain.backend.logits(batch), recorded))
        tokens = recorded.argmax(-1).cpu().numpy()
    return {
        "recorded": getattr(runner.backend, "records", False),
        "bfloat16 attention": runner.attention_name,
        "recorded bits equal": all(equal),
    }
