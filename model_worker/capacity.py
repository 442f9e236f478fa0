"""The capacity of one device for a model: KV blocks, rows, and the longest sequence.

Knows sizes. Does not know where the wishes come from, nor how the blocks are used.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

from model_worker.kv_cache import default_kv_memory
from model_worker.model import LoadedModel, check_positions

log = logging.getLogger(__name__)

# Part of the KV memory that the recurrent states of rows may take; beyond, rows are fewer.
_MOST_OF_STATES = 0.5


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
    not taken. The states of recurrent layers are taken from the memory, so that there may be fewer rows.
    """
    memory = kv_memory or default_kv_memory(loaded.device)
    if loaded.recurrent is not None:
        each = loaded.recurrent.layout.bytes_per_row
        max_rows = _rows_with_states(each, memory, max_rows)
        memory -= each * max_rows
    wanted = max_model_len or loaded.max_position or sys.maxsize
    useful = -(-wanted // block_size) * max_rows
    num_blocks = min(loaded.attention.layout.blocks_for(memory, block_size), useful)
    room = num_blocks * block_size
    _check_length(max_model_len, loaded.max_position, room)
    return Capacity(num_blocks, block_size, max_rows, min(wanted, loaded.max_position or wanted, room))


def _rows_with_states(each: int, memory: int, wanted: int) -> int:
    """Return the number of rows, at most `wanted`, whose recurrent states of `each` bytes leave memory for K and V."""
    rows = min(wanted, int(memory * _MOST_OF_STATES) // each)
    if rows < 1:
        raise ValueError(
            f"kv memory of {memory} bytes is too little: the recurrent state of one sequence takes {each} bytes; "
            "raise kv_memory"
        )
    if rows < wanted:
        text = "at most %d sequences run together, and not %d: each has a recurrent state of %.1f MB; raise kv_memory"
        log.warning(text, rows, wanted, each / 1e6)
    return rows


def _check_length(wanted: int | None, max_position: int | None, room: int) -> None:
    check_positions(wanted, max_position)
    if wanted is not None and wanted > room:
        raise ValueError(
            f"max_model_len {wanted} does not fit the KV memory, which holds {room} tokens; raise kv_memory"
        )
