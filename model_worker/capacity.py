"""The capacity of one device for a model: KV blocks, rows, and the longest sequence.

Knows sizes. Does not know where the wishes come from, nor how the blocks are used.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from model_worker.kv_cache import default_kv_memory
from model_worker.model import LoadedModel, check_positions


@dataclass(frozen=True)
class Capacity:
    """KV blocks, rows and lengths. `max_model_len` counts the tokens of one sequence, prompt and answer."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_model_len: int


def capacity_for(
    loaded: LoadedModel, kv_memory: int | None, max_model_len: int | None, max_rows: int, block_size: int
) -> Capacity:
    """Choose the capacity. None means: memory by default, and the length that model and memory allow.

    ValueError when the length does not fit. Memory that `max_rows` sequences of the greatest length could not fill is
    not taken.
    """
    memory = kv_memory or default_kv_memory(loaded.device)
    wanted = max_model_len or loaded.max_position or sys.maxsize
    useful = -(-wanted // block_size) * max_rows
    num_blocks = min(loaded.attention.layout.blocks_for(memory, block_size), useful)
    room = num_blocks * block_size
    _check_length(max_model_len, loaded.max_position, room)
    return Capacity(num_blocks, block_size, max_rows, min(wanted, loaded.max_position or wanted, room))


def _check_length(wanted: int | None, max_position: int | None, room: int) -> None:
    check_positions(wanted, max_position)
    if wanted is not None and wanted > room:
        raise ValueError(
            f"max_model_len {wanted} does not fit the KV memory, which holds {room} tokens; raise kv_memory"
        )
