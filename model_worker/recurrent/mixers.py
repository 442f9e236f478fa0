"""The recurrent layers of a model in a packed pass: each computes its rows in groups, from their states and to them.

A mixer is a module that asks transformers' cache for a state and gives it a new one: a short convolution, a gated delta
net, a Mamba. Its forward pass is transformers' own. It is given the hidden states of one group of sequences at a time
and, as its cache, the states of their rows: all sequences with one token are a group, and each with more is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model_worker.batch import ForwardBatch
from model_worker.recurrent.states import RecurrentStates, StateKey, StateLayout


@dataclass(frozen=True, eq=False)
class RecurrentLayers:
    """The mixers of a model, and the states that they keep."""

    mixers: tuple[nn.Module, ...]
    layout: StateLayout


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences of a pass that mixers compute together, with `length` tokens each."""

    rows: Tensor  # i64[S]
    tokens: Tensor | slice  # i64[S * length]: their packed tokens, one sequence after the other
    length: int


@dataclass(frozen=True, eq=False)
class _Pass:
    states: RecurrentStates
    groups: list[Group]


_current: ContextVar[_Pass | None] = ContextVar("recurrent_pass", default=None)
# The packed tokens that a mixer is computing; None outside of mixers.
_computing: ContextVar[Tensor | slice | None] = ContextVar("computing_tokens", default=None)


def tokens_in_progress() -> Tensor | slice | None:
    """Return the packed tokens that a mixer is given now; None where modules are given all tokens of a pass."""
    return _computing.get()


@contextmanager
def advancing(states: RecurrentStates | None, batch: ForwardBatch) -> Iterator[None]:
    """The context in which a batch's tokens advance the states of its rows, by a recorded pass or another.

    After an error these rows can only begin anew.
    """
    if states is None:
        yield
        return
    rows = states.begin(batch)
    yield
    states.end(batch, rows)


@contextmanager
def recurrent_pass(states: RecurrentStates | None, batch: ForwardBatch) -> Iterator[None]:
    """Let mixers compute the rows of a batch within this context, and advance their states.

    A pass that is to be recorded computes the rows that lie in `batch.recorded_rows` then; who replays it is in
    `advancing`.
    """
    if states is None:
        yield
        return
    if batch.recorded_rows is not None:
        with _computed_in(_Pass(states, [Group(batch.recorded_rows, slice(None), 1)])):
            yield
        return
    with advancing(states, batch), _computed_in(_Pass(states, _groups(batch, batch.state_rows))):
        yield


@contextmanager
def _computed_in(current: _Pass) -> Iterator[None]:
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


def replace_forwards(mixers: Iterable[nn.Module]) -> None:
    """Let mixers compute in groups within `recurrent_pass`. Elsewhere they compute as before."""
    for mixer in mixers:
        mixer.forward = _in_groups(mixer.forward)


def _groups(batch: ForwardBatch, rows: np.ndarray[Any, Any]) -> list[Group]:
    """Cut a batch whose sequences have these rows."""
    assert batch.query_lens is not None
    device = batch.tokens.device
    ends = np.cumsum(batch.query_lens)
    single = np.flatnonzero(batch.query_lens == 1)
    groups = []
    if len(single) == len(rows):
        groups.append(Group(torch.from_numpy(rows).to(device), slice(None), 1))
    elif len(single):
        tokens = torch.from_numpy(ends[single] - 1).to(device)
        groups.append(Group(torch.from_numpy(rows[single]).to(device), tokens, 1))
    for sequence in np.flatnonzero(batch.query_lens > 1).tolist():
        length, end = int(batch.query_lens[sequence]), int(ends[sequence])
        row = torch.from_numpy(rows[sequence : sequence + 1]).to(device)
        groups.append(Group(row, slice(end - length, end), length))
    return groups


def _in_groups(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def in_groups(hidden_states: Tensor, *positional: Any, **named: Any) -> Tensor:
        current = _current.get()
        if current is None:
            return forward(hidden_states, *positional, **named)
        named["attention_mask"] = None
        out = None
        for group in current.groups:
            held = RowStates(current.states, group.rows)
            named["cache"] = held
            token = _computing.set(group.tokens)
            try:
                part = hidden_states[0, group.tokens].unflatten(0, (len(group.rows), group.length))
                computed = forward(part, **named).flatten(0, 1)
            finally:
                _computing.reset(token)
            held.write()
            if out is None:
                out = computed.new_empty(hidden_states.shape[1], computed.shape[-1])
            out[group.tokens] = computed
        assert out is not None
        return out.unsqueeze(0)

    return in_groups


class RowStates:
    """The states of some rows, as a mixer knows transformers' cache. What it leaves here is kept by `write`."""

    def __init__(self, states: RecurrentStates, rows: Tensor) -> None:
        self._tensors = states.tensors
        self._rows = rows
        self._held: dict[StateKey, Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the last inputs of a convolution, [rows, channels, kernel size]. They may be changed in place."""
        return self._state(StateKey("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, [rows, ...], which may be changed in place; None where the layer keeps none."""
        key = StateKey("recurrent", layer_idx, state_idx)
        return self._state(key) if key in self._tensors else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take the inputs of a convolution, [rows, channels, tokens]. Returns them behind the earlier ones."""
        key = StateKey("conv", layer_idx, state_idx)
        before = self._state(key)
        whole = torch.cat([before, conv_states], -1)
        self._held[key] = whole[..., -before.shape[-1] :]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take a new recurrent state."""
        self._held[StateKey("recurrent", layer_idx, state_idx)] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether all inputs of convolutions are kept."""
        return False

    def write(self) -> None:
        """Keep the states."""
        for key, state in self._held.items():
            kept = self._tensors[key]
            kept.index_copy_(0, self._rows, state.to(kept.dtype))

    def _state(self, key: StateKey) -> Tensor:
        if key not in self._held:
            self._held[key] = self._tensors[key].index_select(0, self._rows)
        return self._held[key]
