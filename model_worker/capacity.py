"""The capacity of one device for a model: KV blocks, rows, and the longest sequence.

Knows sizes. Does not know where the wishes come from, nor how the blocks are used.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

from model_worker.kv_cache import default_kv_memory
from model_worker.model import LoadedModel, check_positions
from model_worker.recurrent.states import StateLayout

log = logging.getLogger(__name__)

# Part of the KV memory that the recurrent states of rows leave for K and V; beyond, rows are fewer.
_LEFT_BY_STATES = 0.5


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
    not taken. The states of recurrent layers are taken from the memory, so that there may be fewer rows. They leave
    half of it, and room for one sequence of `max_model_len` tokens.
    """
    check_positions(max_model_len, loaded.max_position)
    memory = kv_memory or default_kv_memory(loaded.device)
    if loaded.recurrent is not None:
        block = loaded.attention.layout.bytes_per_block(block_size)
        sequence = -(-(max_model_len or 1) // block_size) * block
        if loaded.device.type == "cuda":
            # That of rows which pad recorded steps.
            memory -= loaded.recurrent.layout.bytes_per_row
        max_rows = _rows_with_states(loaded.recurrent.layout, memory, sequence, max_model_len, max_rows)
        memory -= loaded.recurrent.layout.bytes_per_row * max_rows
    wanted = max_model_len or loaded.max_position or sys.maxsize
    useful = -(-wanted // block_size) * max_rows
    num_blocks = min(loaded.attention.layout.blocks_for(memory, block_size), useful)
    room = num_blocks * block_size
    _check_length(max_model_len, room)
    if loaded.recurrent is not None and room < wanted < sys.maxsize:
        log.warning(
            "a sequence has at most %d tokens, and not the model's %d: the recurrent states of %d sequences leave no "
            "memory for more; raise kv_memory, lower max_running, or set max_model_len",
            *(room, wanted, max_rows),
        )
    return Capacity(num_blocks, block_size, max_rows, min(wanted, room))


def _rows_with_states(layout: StateLayout, memory: int, sequence: int, length: int | None, wanted: int) -> int:
    """Return the number of rows, at most `wanted`, whose recurrent states leave memory for K and V.

    One `sequence` has so many bytes of K and V; it has as many tokens as the `length` that was asked for, if any was.
    ValueError if it does not fit beside its state.
    """
    each = layout.bytes_per_row
    if memory < sequence + each:
        short = "" if length is None else f"max_model_len {length} does not fit, even with max_running 1: "
        less = "" if length is None else ", or lower max_model_len"
        raise ValueError(
            f"{short}kv memory of {memory} bytes is too little: the recurrent state of one sequence takes {each} "
            f"bytes, and its K and V {sequence}; raise kv_memory{less}"
        )
    left = max(sequence, int(memory * _LEFT_BY_STATES))
    rows = min(wanted, max(1, (memory - left) // each))
    if rows < wanted:
        log.warning(
            "at most %d sequences run together, and not %d as max_running says: each has a recurrent state of %.1f MB; "
            "raise kv_memory%s",
            *(rows, wanted, each / 1e6, "" if length is None else ", or lower max_model_len"),
        )
    return rows


def _check_length(wanted: int | None, room: int) -> None:
    if wanted is not None and wanted > room:
        raise ValueError(
            f"max_model_len {wanted} does not fit the KV memory, which holds {room} tokens; raise kv_memory"
        )
