"""Paged attention for CPUs: a numba kernel reads the blocks where they lie, on all cores.

Knows how to cut a batch into work: a tile is a few consecutive query tokens of one sequence (one token for a decode
row), a unit is a tile and a range of KV heads. Units are shared out to cores by cost beforehand, because lengths in a
batch differ widely. Does not know the arithmetic, which is cpu_kernel.py's.
"""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.attention.cpu_kernel import run_core, run_cores
from model_worker.attention.cpu_plan import Plan, share_out, tiles_of, total_cost
from model_worker.batch import ForwardBatch
from model_worker.cpu.fused.attention_plan import STREAMING_ROWS
from model_worker.kv_cache import AttentionParams, memory_of

_numba_config: Any = numba.config
# numba's own pool, whose idle threads sleep: those of its OpenMP pool, a second one beside torch's, spin on their core.
_numba_config.THREADING_LAYER = "workqueue"

# That pool ends the process if two threads use it at once.
_pool = Lock()
_NO_WINDOW = 1 << 40
_NO_SINKS = np.empty(0, np.float32)
_NONE_SEEN = np.empty((2, 0), np.int32)
# Waking another core costs tens of microseconds, so each is given at least about as much work.
_FLOPS_PER_CORE = 2_000_000


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Attend with T queries over float32 or bfloat16 blocks whose memory is laid out head by head."""
    kv_heads = k_cache.shape[2]
    flops = 2 * (k_cache.shape[3] + v_cache.shape[3])
    plan = _plan(batch, kv_heads, q.shape[1] // kv_heads, flops, params.sliding_window)
    out = np.empty((q.shape[0], q.shape[1], v_cache.shape[3]), np.float32)
    arguments = (
        q.float().contiguous().numpy(),
        memory_of(k_cache),
        memory_of(v_cache),
        batch.block_tables.numpy(),
        plan.tiles,
        plan.units,
        plan.bounds,
        np.float32(params.scale),
        _NO_WINDOW if params.sliding_window is None else params.sliding_window,
        np.float32(params.softcap or 0.0),
        _NO_SINKS if params.sinks is None else params.sinks.float().numpy(),
        _NONE_SEEN if batch.seen is None or not params.looks_ahead else _within(batch.seen, batch),
        out,
    )
    if plan.cores == 1:
        run_core(0, *arguments)
    else:
        with _pool:
            numba.set_num_threads(plan.cores)
            run_cores(*arguments)
    return torch.from_numpy(out).to(q.dtype)


def _within(seen: Tensor, batch: ForwardBatch) -> NDArray[np.int32]:
    """Return `seen` within the keys that there are."""
    last = torch.repeat_interleave(batch.kv_len - 1, batch.query_start.diff())
    return torch.minimum(seen, last).clamp_min(0).numpy()


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels for a cache of `dtype`, or load them from numba's cache of compiled code."""
    q = np.zeros((1, 1, 1), np.float32)
    blocks = memory_of(torch.zeros(1, 1, 1, 1, dtype=dtype))
    tiles = np.array([[0, 0, 1, 0]])
    units = np.array([[0, 0, 1]])
    batch = (np.zeros((1, 1), np.int32), tiles, units, np.array([0, 1]))
    scalars = np.float32(1.0), _NO_WINDOW, np.float32(0.0)
    arguments = (q, blocks, blocks, *batch, *scalars, _NO_SINKS, _NONE_SEEN, q.copy())
    run_core(0, *arguments)
    with _pool:
        numba.set_num_threads(1)
        run_cores(*arguments)


# All layers of a forward pass share their plans; the batch itself stays free of any backend's matters.
_plans: WeakKeyDictionary[ForwardBatch, dict[tuple[int | None, ...], Plan]] = WeakKeyDictionary()


def _plan(batch: ForwardBatch, kv_heads: int, group: int, flops: int, window: int | None) -> Plan:
    """Cut a batch into tiles and units. `flops` are those of one query head and one key."""
    plans = _plans.setdefault(batch, {})
    key = (kv_heads, group, flops, window)
    if key not in plans:
        tiles = tiles_of(batch.query_start.numpy(), batch.kv_len.numpy(), group)
        available = min(torch.get_num_threads(), _numba_config.NUMBA_NUM_THREADS)
        reach = _NO_WINDOW if window is None else window
        worth = total_cost(tiles, reach) * kv_heads * group * flops // _FLOPS_PER_CORE
        cores = int(np.clip(worth, 1, available))
        plans[key] = Plan(tiles, *share_out(tiles, kv_heads, group, reach, cores, STREAMING_ROWS))
    return plans[key]
