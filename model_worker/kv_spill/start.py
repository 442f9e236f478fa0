"""Makes what moves blocks of a worker's KV cache: beside it, by the settings, and to other workers."""

from __future__ import annotations

from pathlib import Path

import torch

from model_worker.kv_cache import KVCache
from model_worker.kv_spill.blocks import Blocks, DeviceBlocks, HostBlocks
from model_worker.kv_spill.mover import KvMover
from model_worker.kv_spill.places import DiskPlace, MemoryPlace
from model_worker.kv_spill.shipper import KvShipper, kv_form

# The scheduler keeps a few hundred bytes for each slot.
MOST_SLOTS = 1_000_000


def kv_mover(
    cache: KVCache, num_blocks: int, device: torch.device, size: int, folder: str, epoch: int, index: int
) -> KvMover:
    """Make a place of `size` bytes in a folder, or in host memory if `folder` is empty.

    `epoch` and `index` are the worker's. ValueError says which setting is to be changed.
    """
    if not folder and device.type == "cpu":
        raise ValueError("kv_spill wants kv_spill_dir on a CPU, whose KV cache lies in host memory already")
    blocks = _blocks(cache, device)
    slots = min(size // blocks.block_bytes, MOST_SLOTS)
    if not slots:
        raise ValueError(f"kv_spill of {size} bytes holds no block, which takes {blocks.block_bytes} bytes: raise it")
    place = (
        DiskPlace(Path(folder).expanduser(), blocks.block_bytes) if folder else MemoryPlace(slots, blocks.block_bytes)
    )
    return KvMover(blocks, place, slots, num_blocks, epoch, index)


def kv_shipper(
    cache: KVCache, num_blocks: int, device: torch.device, epoch: int, index: int, *, shares: bool
) -> KvShipper:
    """Make what sends blocks to other workers. `shares`: the scheduler is on this machine."""
    return KvShipper(_blocks(cache, device), num_blocks, kv_form(cache, device), epoch, index, shares)


def _blocks(cache: KVCache, device: torch.device) -> Blocks:
    return HostBlocks(cache) if device.type == "cpu" else DeviceBlocks(cache, device)
