"""Blocks go from one KV cache to another: the same bytes, or none."""

from __future__ import annotations

import select
from dataclasses import replace

import numpy as np
import pytest
import torch

from interfaces import KvPiece, KvTaken, SharedMemoryArray, ShipKv, TakeKv, decode, encode
from interfaces.wire.shared_memory import DIRECTORY
from model_worker.kv_cache import KVCache, KVLayout
from model_worker.kv_spill import start
from model_worker.kv_spill.blocks import DeviceBlocks
from model_worker.kv_spill.shipper import KvShipper, kv_form
from model_worker.kv_spill.start import kv_shipper
from tests.model_worker.kv_spill.test_moves import BLOCKS, CPU, contents, filled, holds, layout


@pytest.fixture(params=["host", "device"], autouse=True)
def kind_of_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's way, too, on the memory of a CPU."""
    if request.param == "device":
        monkeypatch.setattr(start, "_blocks", DeviceBlocks)


def shipper(cache: KVCache, index: int = 0, shares: bool = True) -> KvShipper:
    return kv_shipper(cache, BLOCKS, CPU, 7, index, shares=shares)


def numbers(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


def answer(one: KvShipper, order: ShipKv | TakeKv) -> KvPiece | KvTaken:
    one.obey(decode(encode(order), ipc_peer=True))
    assert select.select([one.fileno()], [], [], 60)[0]
    [found] = one.take()
    told = decode(encode(found), ipc_peer=True)
    assert (told.incarnation, told.epoch, told.ticket) == (order.incarnation, 7, order.ticket)
    assert isinstance(told, KvPiece | KvTaken)
    return told


def piece(one: KvShipper, *blocks: int) -> KvPiece:
    found = answer(one, ShipKv(1, 7, 5, numbers(*blocks)))
    assert isinstance(found, KvPiece)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shares", [True, False])
def test_blocks_arrive_as_they_were(dtype: torch.dtype, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interfaces.wire.shared_memory.MESSAGE_THRESHOLD", 1)
    source, target = filled(dtype), filled(dtype)
    wanted = [contents(source, block) for block in (4, 1, 9)]
    kept = contents(target, 0)
    sent = piece(shipper(source, shares=shares), 4, 1, 9)
    assert isinstance(sent.data, SharedMemoryArray) == shares
    taken = answer(shipper(target, 1), TakeKv(1, 7, 6, numbers(2, 3, 11), sent.data))
    assert isinstance(taken, KvTaken)
    assert taken.whole
    for block, content in zip((2, 3, 11), wanted, strict=True):
        assert holds(target, block, content)
    assert holds(target, 0, kept)
    if isinstance(sent.data, SharedMemoryArray):
        assert not (DIRECTORY / sent.data.name).exists(), "its reader has removed it"


def test_a_segment_can_be_read_by_its_user_alone_and_goes_with_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interfaces.wire.shared_memory.MESSAGE_THRESHOLD", 1)
    maker = shipper(filled())
    data = piece(maker, 1).data
    assert isinstance(data, SharedMemoryArray)
    assert (DIRECTORY / data.name).stat().st_mode & 0o777 == 0o600
    assert maker._handover is not None
    maker._handover._segments.release_all()  # as the process does at its end
    target = filled()
    kept = contents(target, 3)
    taken = answer(shipper(target), TakeKv(1, 7, 6, numbers(3), data))
    assert isinstance(taken, KvTaken)
    assert not taken.whole
    assert holds(target, 3, kept)


@pytest.mark.parametrize("blocks", [(), (BLOCKS,), (-1,)])
def test_blocks_that_there_are_not_are_not_sent(blocks: tuple[int, ...]) -> None:
    data = piece(shipper(filled()), *blocks).data
    assert data.nbytes == 0


@pytest.mark.parametrize("short", [1, 17])
def test_too_few_bytes_fill_nothing(short: int) -> None:
    source, target = filled(), filled()
    data = piece(shipper(source, shares=False), 1, 2).data
    assert isinstance(data, np.ndarray)
    kept = contents(target, 3)
    taken = answer(shipper(target), TakeKv(1, 7, 6, numbers(3, 4), data[:-short]))
    assert isinstance(taken, KvTaken)
    assert not taken.whole
    assert holds(target, 3, kept)


def test_only_caches_of_one_form_fit_each_other() -> None:
    cache = filled()
    forms = [
        kv_form(cache, CPU),
        kv_form(cache, torch.device("cuda:1")),
        kv_form(filled(torch.bfloat16), CPU),
        kv_form(KVCache(layout(), BLOCKS, 8, CPU), CPU),
        kv_form(KVCache(replace(layout(), layers=layout().layers[:1]), BLOCKS, 4, CPU), CPU),
    ]
    assert len(set(forms)) == len(forms)
    assert kv_form(KVCache(KVLayout(layout().layers, torch.float32), 3, 4, CPU), CPU) == forms[0]
