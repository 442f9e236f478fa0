"""Sums and gathers among ranks, which are threads here: every rank gets the same, and one that fails is named."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.tensor_parallel.exchange import Exchange, GroupLost

# Small, so that tensors are exchanged in several pieces.
SLOT_BYTES = 64


def exchanges(ranks: int, **options: Any) -> list[Exchange]:
    memory = mmap.mmap(-1, Exchange.bytes_for(ranks, SLOT_BYTES))
    return [Exchange(memory, rank, [os.getpid()] * ranks, SLOT_BYTES, **options) for rank in range(ranks)]


def on_all(ends: list[Exchange], work: Callable[[Exchange], Any]) -> list[Any]:
    """What each rank's work returns, all at once."""
    with ThreadPoolExecutor(len(ends)) as threads:
        return list(threads.map(work, ends))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_same_sums(ranks: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng()
    shapes = [tuple(int(size) for size in rng.integers(1, 9, rng.integers(1, 4))) for _ in range(20)]
    parts = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(ranks)]

    def work(end: Exchange) -> list[Tensor]:
        return [end.sum(part) for part in parts[end.rank]]

    for place, sums in enumerate(zip(*on_all(exchanges(ranks), work), strict=True)):
        expected = parts[0][place].float()
        for other in parts[1:]:
            expected = expected + other[place].float()
        assert all(torch.equal(one, expected.to(dtype)) for one in sums)


@pytest.mark.parametrize("widths", [[3, 3], [5, 4], [1, 2, 3]])
def test_parts_are_joined_in_the_order_of_ranks(widths: list[int]) -> None:
    whole = [torch.randn(rows, sum(widths)) for rows in (1, 7, 20)]

    def work(end: Exchange) -> list[Tensor]:
        return [end.gather(one.split(widths, dim=1)[end.rank], widths) for one in whole]

    for joined in on_all(exchanges(len(widths)), work):
        assert all(torch.equal(got, wanted) for got, wanted in zip(joined, whole, strict=True))


def test_a_row_that_fits_no_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 17 elements does not fit a slot of 64 bytes"):
        exchanges(2)[0].gather(torch.zeros(1, 17), [17, 17])


def test_a_rank_that_does_something_else_is_named() -> None:
    def work(end: Exchange) -> str:
        with pytest.raises(GroupLost) as lost:
            end.sum(torch.zeros(3 if end.rank == 1 else 4))
        return str(lost.value)

    stories = on_all(exchanges(2), work)
    assert all(story.startswith(f"rank 1 (pid {os.getpid()}) diverges: in exchange 1 ") for story in stories)


def test_a_rank_that_does_not_come_is_named() -> None:
    end, _ = exchanges(2, patience=0.2)
    with pytest.raises(GroupLost, match=r"rank 1 \(pid \d+\) hangs: it has not come to exchange 1 in .*last was 0"):
        end.sum(torch.zeros(1))


def test_the_death_of_another_rank_ends_the_wait() -> None:
    def check() -> None:
        raise GroupLost("rank 1 has ended")

    with pytest.raises(GroupLost, match="rank 1 has ended"):
        exchanges(2, check_peers=check)[0].sum(torch.zeros(1))
