"""Passes that all ranks of a group compute together: rank 0 sends each batch to the others, and computes its part.

Knows batches as bytes. Does not know what is split, nor which process is which.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from model_worker.backends.base import Backend
from model_worker.batch import ForwardBatch

_HEAD = struct.Struct("<I")
# The columns of a batch that a model of text computes with.
_COLUMNS = ("tokens", "positions", "query_start", "kv_len", "block_tables", "slots", "logit_positions")
_BOUNDS = ("block_size", "max_query", "max_kv")


class Sending(Protocol):
    """What takes messages to all other ranks."""

    def send(self, message: bytes) -> None: ...


class GroupBackend(Backend):
    """Rank 0's part of a model, with which the others compute theirs."""

    def __init__(self, part: Backend, block_size: int, others: Sending) -> None:
        self.device = part.device
        self.vocab_size = part.vocab_size
        self._part = part
        self._block_size = block_size
        self._others = others

    def logits(self, batch: ForwardBatch) -> Tensor:
        self._send(batch)
        return self._part.logits(batch)

    @property
    def gives_hidden_states(self) -> bool:
        return self._part.gives_hidden_states

    def hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        self._send(batch)
        return self._part.hidden(batch)

    def _send(self, batch: ForwardBatch) -> None:
        if batch.block_size != self._block_size:
            raise ValueError(f"the batch has blocks of {batch.block_size} tokens, the cache of {self._block_size}")
        self._others.send(packed(batch))


def follow(part: Backend, receive: Callable[[], bytes]) -> None:
    """Compute this rank's part of each batch that `receive` returns, until that is empty."""
    while message := receive():
        part.logits(unpacked(message))


def packed(batch: ForwardBatch) -> bytes:
    """Return a batch of plain text as bytes. ValueError for one that has more: only plain text is sent."""
    for name in ("embeddings", "seen", "adapters"):
        if getattr(batch, name) is not None:
            raise ValueError(f"a batch with {name} is not computed in parts")
    columns = [getattr(batch, name).numpy() for name in _COLUMNS]
    head = {
        "columns": [[str(column.dtype), list(column.shape)] for column in columns],
        **{name: getattr(batch, name) for name in _BOUNDS},
    }
    text = json.dumps(head).encode()
    return b"".join([_HEAD.pack(len(text)), text, *(column.tobytes() for column in columns)])


def unpacked(message: bytes) -> ForwardBatch:
    """Return the batch that `packed` has made into bytes."""
    (length,) = _HEAD.unpack_from(message)
    place = _HEAD.size + length
    head = json.loads(message[_HEAD.size : place])
    # Tensors on memory that nothing may write would warn.
    data = bytearray(message)
    fields: dict[str, Any] = {name: int(head[name]) for name in _BOUNDS}
    for name, (dtype, shape) in zip(_COLUMNS, head["columns"], strict=True):
        count = math.prod(shape)
        column = np.frombuffer(data, dtype, count, place)
        place += column.nbytes
        fields[name] = torch.from_numpy(column.reshape(shape))
    return ForwardBatch(**fields)
