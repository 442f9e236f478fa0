"""Steps are filled in by a kernel as they are by torch's operations, and tokens that the device has are looked up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model_worker.batch import ForwardBatch
from model_worker.cuda.fill_proof import fills_are_right
from model_worker.cuda.graphs import DecodeBuffers
from model_worker.cuda.mixed_graphs import MixedBuffers
from tests.model_worker.cuda.interpreter import need_triton

need_triton()

SIZE, BLOCKS_PER_ROW, MAX_ROWS, MAX_TOKENS, SPARE = 4, 7, 6, 20, 999
PLACES = BLOCKS_PER_ROW, SIZE, SPARE, torch.device("cpu")


def step(rng: np.random.Generator, queries: list[int], pasts: list[int], deferred: bool) -> ForwardBatch:
    lens: NDArray[np.int64] = np.array(queries, np.int64) + np.array(pasts, np.int64)
    tables = rng.integers(0, SPARE, (len(queries), -(-int(lens.max()) // SIZE)))
    count = sum(queries)
    owners = np.where(rng.random(count) < 0.5, rng.integers(0, MAX_ROWS, count), -1)
    wanted = np.cumsum(np.array(queries)) - 1
    batch = ForwardBatch.build(
        rng.integers(3, 99, count), np.array(queries), lens, tables, SIZE, wanted, owners=owners if deferred else None
    )
    return replace(batch, last_tokens=torch.from_numpy(rng.integers(100, 200, MAX_ROWS)))


def columns(buffers: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("queries", "pasts", "size"),
    [([1, 1, 1], [0, 27, 9], 4), ([1], [3], 1), ([1] * 6, list(range(6)), 6), ([5, 1, 9], [0, 20, 3], 16)],
)
def test_a_kernel_fills_in_what_operations_do(queries: list[int], pasts: list[int], size: int, deferred: bool) -> None:
    rng = np.random.default_rng()
    batch = step(rng, queries, pasts, deferred)
    pairs: list[Any] = [[MixedBuffers(MAX_TOKENS, MAX_ROWS, *PLACES, kernels) for kernels in (False, True)]]
    if max(queries) == 1:
        pairs.append([DecodeBuffers(MAX_ROWS, *PLACES, kernels) for kernels in (False, True)])
    for plain, launched in pairs:
        for buffers in (plain, launched):
            for tensor in columns(buffers).values():
                tensor.fill_(7)
            buffers.fill(batch, size)
        for name, want in columns(plain).items():
            assert torch.equal(columns(launched)[name], want), name


def test_tokens_that_the_device_has_take_their_places() -> None:
    batch = step(np.random.default_rng(), [3, 1], [0, 5], deferred=True)
    assert batch.owners is not None
    known = batch.resolved()
    for token, owner, given in zip(known.tokens.tolist(), batch.owners.tolist(), batch.tokens.tolist(), strict=True):
        assert token == (given if owner < 0 else int(batch.last_tokens[owner]))  # type: ignore[index]
    assert known.resolved() is known


def test_kernels_are_proven_before_they_fill(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")
    assert fills_are_right(device)
    right = MixedBuffers._launch

    def wrong(self: MixedBuffers, batch: ForwardBatch, size: int) -> None:
        right(self, batch, size)
        self._kv_len[0] += 1

    monkeypatch.setattr(MixedBuffers, "_launch", wrong)
    assert not fills_are_right(device)
    assert "kernels fill them otherwise" in caplog.text

    def failing(self: MixedBuffers, batch: ForwardBatch, size: int) -> None:
        raise RuntimeError("no compiler\nbacktrace")

    monkeypatch.setattr(MixedBuffers, "_launch", failing)
    assert not fills_are_right(device)
    assert caplog.text.rstrip().endswith("since kernels fail: no compiler")
