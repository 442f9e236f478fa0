"""Low-rank factors of adapters on a device, where kernels find them by the slot of a row (cuda/adapter_kernel.py).

A recorded step reads tables that stay where they are: an adapter that comes or leaves changes what is in them. Knows
modules and factors. Does not know rows of a batch.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_worker.adapters.fitting import MOST_RANK, AdaptedEmbedding, AdaptedLinear, Adapter

SLOTS = 256
# As cuda/adapter_kernel.py has them: the numbers of a slot, bytes of a unit, and ranks that it takes at a time.
_FIELDS = 6
_UNIT = 16
_RANKS = 16
_TRIAL_WIDTH, _TRIAL_OUTPUTS, _TRIAL_RANKS = 1100, 200, (3, 20)
# Of the largest output: one rounding to bfloat16.
_TOLERANCE = 1e-2
T = TypeVar("T", AdaptedLinear, AdaptedEmbedding)
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Table:
    """The factors of a module by slot, i64 [SLOTS, FIELDS], and the most ranks of one."""

    numbers: Tensor
    widest: int = _RANKS

    def widen(self, rank: int) -> bool:
        """Let it have factors of this rank. Returns whether it could have only smaller ones."""
        before = self.widest
        while self.widest < rank:
            self.widest *= 2
        return self.widest > before


@dataclass(frozen=True, eq=False)
class _Factors:
    """What a slot of a table points to. A is [rank, in] for a linear module, [vocabulary, rank] for an embedding."""

    a: Tensor
    b: Tensor  # [out, rank]
    scale: float
    gain: Tensor | None = None  # f32 [out]
    shift: Tensor | None = None  # f32 [out], behind the gain

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    def numbers(self, base: Tensor) -> list[int]:
        """Return a row of a table, whose places of factors count from `base`."""
        places = [(factor.data_ptr() - base.data_ptr()) // _UNIT for factor in (self.a, self.b)]
        behind = [0 if column is None else column.data_ptr() for column in (self.gain, self.shift)]
        return [*places, self.rank, _bits(self.scale), *behind]


class AdapterSlots:
    """The adapters of a model that kernels add. Others, of another form or beyond SLOTS, are added otherwise."""

    def __init__(self, device: torch.device, dtype: torch.dtype, embedding: nn.Module) -> None:
        """Factors lie on this device, and have this dtype, as rows have. `embedding` is that of tokens."""
        self._device = device
        self._dtype = dtype
        self._embedding = embedding
        self._base = torch.zeros(_UNIT, dtype=dtype, device=device)
        self._tables: dict[nn.Module, _Table] = {}
        # Of zeros, for modules to come. They are not freed: a step that is under way may still read one.
        self._spare: list[Tensor] = []
        self._slots: dict[int, int] = {}
        self._works: bool | None = None
        self._held: dict[int, Mapping[nn.Module, _Factors]] = {}
        # Changes with the modules that have a table, and their most ranks: what was recorded before knows others. It
        # does so once they have their tables and hooks, so that what is recorded meanwhile counts no more.
        self.generation = 0

    def laid_out(self, adapter: Adapter) -> Adapter:
        """Return an adapter with its factors as kernels read them, which are the same where they lie so."""
        linears = {module: _laid_out(linear) for module, linear in adapter.linears.items()}
        embedding = None if adapter.embedding is None else _laid_out(adapter.embedding)
        return replace(adapter, linears=linears, embedding=embedding)

    def add(self, handle: int, placed: Adapter) -> None:
        """Give an adapter a slot, if it has the form and there is one. Its tensors are on the device, its modules have
        their hooks, and the handle has no slot.

        torch.OutOfMemoryError changes nothing.
        """
        adapter = self.laid_out(placed)
        factors = self._factors(adapter)
        reason = self._unfit(adapter, factors)
        if not reason and not self._proven():
            return
        free = set(range(SLOTS)) - set(self._slots.values())
        if not reason and not free:
            reason = f"{SLOTS} others have come before it"
        if reason:
            said = "adapter %s is computed group by group and not in recorded steps, which is slower: %s"
            log.warning(said, adapter.digest, reason)
            return
        rows = {module: torch.tensor(one.numbers(self._base), device=self._device) for module, one in factors.items()}
        without = [module for module in factors if module not in self._tables]
        while len(self._spare) < len(without):
            self._spare.append(torch.zeros(SLOTS, _FIELDS, dtype=torch.int64, device=self._device))
        self._tables |= {module: _Table(self._spare.pop()) for module in without}
        grown = [self._tables[module].widen(one.rank) for module, one in factors.items()]
        self.generation += bool(without) or any(grown)
        slot = min(free)
        for module, row in rows.items():
            self._tables[module].numbers[slot].copy_(row)
        self._held[handle] = factors
        self._slots[handle] = slot

    def drop(self, handle: int) -> None:
        """Forget an adapter. No pass that uses it is in flight."""
        slot = self._slots.pop(handle, None)
        if slot is None:
            return
        left = self._held.pop(handle)
        for module in left:
            self._tables[module].numbers[slot].zero_()
        # Later steps do not pay for modules that no adapter has.
        unused = set(left).difference(*self._held.values())
        self._spare += [self._tables.pop(module).numbers for module in unused]
        self.generation += bool(unused)

    def has_all(self, handles: NDArray[np.integer[Any]]) -> bool:
        """Whether all of these have slots; 0 is the base model, which needs none."""
        return all(not handle or handle in self._slots for handle in np.unique(handles).tolist())

    def column(self, handles: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Return the slot of each handle, and -1 for the base model."""
        return np.array([self._slots[handle] if handle else -1 for handle in handles.tolist()], np.int32)

    def add_to(self, module: nn.Module, x: Tensor, y: Tensor, column: Tensor) -> None:
        """Change a module's outputs y [T, out] by what the adapters of rows make of its inputs x [T, in], in place."""
        from model_worker.cuda.adapter_kernel import add_low_rank

        table = self._tables.get(module)
        if table is not None:
            _check_rows(module, x, column)
            add_low_rank(y, x.to(self._dtype), self._base, table.numbers, column, table.widest)

    def add_to_vectors(self, module: nn.Module, tokens: Tensor, y: Tensor, column: Tensor) -> None:
        """Change the vectors y [T, hidden] of tokens i64 [T] as the adapters of rows do, in place."""
        from model_worker.cuda.adapter_kernel import add_vectors

        table = self._tables.get(module)
        if table is not None:
            _check_rows(module, tokens, column)
            add_vectors(y, tokens, self._base, table.numbers, column, table.widest)

    def _factors(self, adapter: Adapter) -> dict[nn.Module, _Factors]:
        factors = {
            module: _Factors(one.a, one.b, one.scale, one.gain, _shift(module, one))
            for module, one in adapter.linears.items()
        }
        if adapter.embedding is not None:
            factors[self._embedding] = _Factors(adapter.embedding.a, adapter.embedding.b, adapter.embedding.scale)
        return factors

    def _proven(self) -> bool:
        """Whether the kernels give what torch gives, which the first adapter finds out."""
        if self._works is None:
            reason = unsupported(self._device, self._dtype)
            if reason:
                log.warning("adapters are computed group by group, since kernels for them do not work: %s", reason)
            self._works = not reason
        return self._works

    def _unfit(self, adapter: Adapter, factors: Mapping[nn.Module, _Factors]) -> str:
        """Say what of an adapter kernels cannot compute; empty if they can."""
        if adapter.experts:
            return "it adapts experts"
        rank = max((one.rank for one in factors.values()), default=0)
        if rank > MOST_RANK:
            return f"it has the rank {rank}, as modules that are brought whole have, and kernels add up to {MOST_RANK}"
        if any(not one.a.dtype == one.b.dtype == self._dtype for one in factors.values()):
            return f"its factors are not in {self._dtype}"
        return ""


def _check_rows(module: nn.Module, given: Tensor, column: Tensor) -> None:
    """Kernels read the slot of each row, wherever the column ends."""
    if len(given) != len(column):
        raise ValueError(
            f"a {type(module).__name__} with an adapter is given {len(given)} rows, and the step has {len(column)}: "
            "such modules cannot be adapted"
        )


def _laid_out(linear: T) -> T:
    return replace(linear, a=_at_unit(linear.a), b=_at_unit(linear.b.T).T)


def _at_unit(factor: Tensor) -> Tensor:
    """Return a factor side by side, and where a unit begins."""
    placed = factor.contiguous()
    return placed.clone() if placed.data_ptr() % _UNIT else placed


def _shift(module: nn.Module, linear: AdaptedLinear) -> Tensor | None:
    """Return what is added to gain * (xW' + c + scale * (xA')B'), where c is the module's own bias."""
    own = getattr(module, "bias", None)
    if linear.gain is None or not isinstance(own, Tensor):
        return linear.bias
    shift = (1 - linear.gain) * own.float()
    return shift if linear.bias is None else shift + linear.bias


@lru_cache
def unsupported(device: torch.device, dtype: torch.dtype) -> str:
    """Say why a device does not change rows as it should; empty if it does."""
    for launch, want in trials(device, dtype):
        try:
            y = launch()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a Triton, a compiler or a card without it
            return str(error).partition("\n")[0] or type(error).__name__
        found = float((y.float() - want).abs().max() / want.abs().max())
        if not found <= _TOLERANCE:
            return f"rows are wrong by {found:.2g}"
    return ""


def trials(device: torch.device, dtype: torch.dtype) -> list[tuple[Callable[[], Tensor], Tensor]]:
    """Return launches of the kernels, and what each should give: a step of decode rows, and one of prompts, of linear
    modules, and of an embedding."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    factors = []
    for rank in _TRIAL_RANKS:
        gain, shift = (drawn(_TRIAL_OUTPUTS, dtype=torch.float32) if rank == _TRIAL_RANKS[0] else None for _ in "ab")
        factors.append(_Factors(drawn(rank, _TRIAL_WIDTH), drawn(rank, _TRIAL_OUTPUTS).T, 0.5, gain, shift))
    base = drawn(_UNIT)
    columns = [1, -1, 0, 1], [0] * 126 + [-1, 1, 0, 1]
    vectors = [replace(one, a=drawn(_TRIAL_WIDTH, one.rank)) for one in factors]
    products = [_trial(factors, base, column, drawn) for column in columns]
    return products + [_trial(vectors, base, column, drawn, of_tokens=True) for column in columns]


def _trial(
    factors: list[_Factors], base: Tensor, column: list[int], drawn: Callable[..., Tensor], of_tokens: bool = False
) -> tuple[Callable[[], Tensor], Tensor]:
    """Return the launch for rows of these slots, and what torch makes of them."""
    x, y = drawn(len(column), _TRIAL_WIDTH), drawn(len(column), _TRIAL_OUTPUTS)
    tokens = x.argmax(1)
    want = y.float().clone()
    for slot, one in enumerate(factors):
        rows = torch.tensor(column, device=x.device) == slot
        inner = one.a[tokens[rows]].float() if of_tokens else x[rows].float() @ one.a.float().T
        changed = want[rows] + one.scale * (inner @ one.b.float().T)
        gain = 1.0 if one.gain is None else one.gain
        want[rows] = gain * changed + (0.0 if one.shift is None else one.shift)
    slots = torch.tensor(column, dtype=torch.int32, device=x.device)

    table = torch.tensor([one.numbers(base) for one in factors], device=x.device)

    def launch(_placed: list[_Factors] = factors) -> Tensor:
        """The factors stay where the table says as long as this does."""
        from model_worker.cuda.adapter_kernel import add_low_rank, add_vectors

        changed = y.clone()
        if of_tokens:
            add_vectors(changed, tokens, base, table, slots, 2 * _RANKS)
        else:
            add_low_rank(changed, x, base, table, slots, 2 * _RANKS)
        return changed

    return launch, want


def _bits(scale: float) -> int:
    found: int = struct.unpack("<i", struct.pack("<f", scale))[0]
    return found
