"""Passes that all ranks of a group compute together: rank 0 sends each batch to the others, and computes its part.

On a CPU a batch goes to them as bytes. On GPUs its columns are on the device, some of them drawn there a moment ago, so
that only their shapes go as bytes; the columns follow from device to device, and no rank waits for its device. Knows
batches. Does not know what is split, nor which process is which.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from model_worker.backends.base import Backend
from model_worker.batch import ForwardBatch
from model_worker.device_copy import ALIGNMENT
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.steps import Steps

_HEAD = struct.Struct("<I")
# The columns of a batch that a model of text computes with, the wide ones first: each begins at a multiple of its own
# width.
_COLUMNS = ("tokens", "positions", "slots", "logit_positions", "query_start", "kv_len", "block_tables")
_DTYPES = (*[torch.int64] * 4, *[torch.int32] * 3)
_BOUNDS = ("block_size", "max_query", "max_kv")


class Sending(Protocol):
    """What takes messages to all other ranks."""

    def send(self, message: bytes) -> None: ...


class Giving(Protocol):
    """What gives tensors of rank 0 to the others, from device to device."""

    def give(self, tensor: Tensor) -> Tensor: ...


class GroupBackend(Backend):
    """Rank 0's part of a model, with which the others compute theirs. On GPUs columns are given by `giving`.

    `steps` counts passes for the watch of the group; None without a watch.

    GroupLost for a pass that the others may have launched, and this rank not.
    """

    def __init__(
        self,
        part: Backend,
        block_size: int,
        others: Sending,
        giving: Giving | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.device = part.device
        self.vocab_size = part.vocab_size
        self._part = part
        self._block_size = block_size
        self._others = others
        self._giving = giving
        self._steps = steps

    def logits(self, batch: ForwardBatch) -> Tensor:
        with self._in_step():
            self._send(batch)
            return self._part.logits(batch)

    @property
    def gives_hidden_states(self) -> bool:
        return self._part.gives_hidden_states

    def hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        with self._in_step():
            self._send(batch, hidden=True)
            return self._part.hidden(batch)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """End the group where this rank's GPU has no memory for a pass: the others have launched all sums of it."""
        try:
            with nullcontext() if self._steps is None else self._steps.step():
                yield
        except torch.OutOfMemoryError as error:
            if self._giving is None:
                raise
            reason = str(error).partition("\n")[0]
            raise GroupLost(
                f"rank 0 has no memory for a step; lower max_batch_tokens or kv_memory ({reason})"
            ) from error

    def _send(self, batch: ForwardBatch, hidden: bool = False) -> None:
        if batch.block_size != self._block_size:
            raise ValueError(f"the batch has blocks of {batch.block_size} tokens, the cache of {self._block_size}")
        if self._giving is None:
            self._others.send(packed(batch, hidden))
            return
        known = batch.resolved()
        self._others.send(_headed(known, hidden))
        self._giving.give(_together(known))


def follow(
    part: Backend, receive: Callable[[], bytes], giving: Giving | None = None, steps: Steps | None = None
) -> None:
    """Compute this rank's part of each batch that `receive` returns, until that is empty. `steps` counts them."""
    while message := receive():
        with nullcontext() if steps is None else steps.step():
            batch, hidden = unpacked(message) if giving is None else _taken(message, giving, part.device)
            # A step that is recorded is longer than one that is not, so all ranks must compute the same of the two.
            if hidden:
                part.hidden(batch)
            else:
                part.logits(batch)


def packed(batch: ForwardBatch, hidden: bool = False) -> bytes:
    """Return a batch of plain text as bytes. ValueError for one that has more: only plain text is sent.

    `hidden`: its hidden states are wanted, too.
    """
    columns = [getattr(batch, name).numpy().tobytes() for name in _COLUMNS]
    return b"".join([_headed(batch, hidden), *columns])


def unpacked(message: bytes) -> tuple[ForwardBatch, bool]:
    """Return the batch that `packed` has made into bytes, and whether its hidden states are wanted."""
    head, place = _head_of(message)
    # Tensors on memory that nothing may write would warn.
    return _batch_of(head, torch.frombuffer(bytearray(message[place:]), dtype=torch.uint8))


def _headed(batch: ForwardBatch, hidden: bool) -> bytes:
    """Return what is to be known of a batch before its columns come."""
    for name in ("embeddings", "seen", "adapters"):
        if getattr(batch, name) is not None:
            raise ValueError(f"a batch with {name} is not computed in parts")
    head = {
        "columns": [list(getattr(batch, name).shape) for name in _COLUMNS],
        "decodes": batch.decodes,
        "hidden": hidden,
        **{name: getattr(batch, name) for name in _BOUNDS},
    }
    text = json.dumps(head).encode()
    return _HEAD.pack(len(text)) + text


def _together(batch: ForwardBatch) -> Tensor:
    """Return the columns of a batch as bytes of one tensor on their device."""
    columns = [getattr(batch, name).contiguous().view(torch.uint8).view(-1) for name in _COLUMNS]
    return torch.cat([nn.functional.pad(column, (0, -len(column) % ALIGNMENT)) for column in columns])


def _taken(message: bytes, giving: Giving, device: torch.device) -> tuple[ForwardBatch, bool]:
    """Return the batch whose columns come from the first rank's device, and whether its hidden states are wanted."""
    head, _ = _head_of(message)
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(head["columns"], _DTYPES, strict=True))
    size = sum(size + -size % ALIGNMENT for size in sizes)
    return _batch_of(head, giving.give(torch.empty(size, dtype=torch.uint8, device=device)), ALIGNMENT)


def _head_of(message: bytes) -> tuple[dict[str, Any], int]:
    """Return the head of a message, and where it ends."""
    (length,) = _HEAD.unpack_from(message)
    place = _HEAD.size + length
    return json.loads(message[_HEAD.size : place]), place


def _batch_of(head: dict[str, Any], data: Tensor, aligned: int = 1) -> tuple[ForwardBatch, bool]:
    """Return the batch whose columns lie one after the other, each at a multiple of so many bytes."""
    fields: dict[str, Any] = {name: int(head[name]) for name in _BOUNDS}
    place = 0
    for name, dtype, shape in zip(_COLUMNS, _DTYPES, head["columns"], strict=True):
        size = math.prod(shape) * dtype.itemsize
        fields[name] = data[place : place + size].view(dtype).view(shape)
        place += size + -size % aligned
    wanted = np.arange(fields["tokens"].shape[0]) if head["decodes"] else None
    return ForwardBatch(**fields, wanted=wanted), bool(head["hidden"])
