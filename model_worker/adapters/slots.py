"""Low-rank factors of adapters on a device, where kernels find them by the slot of a row (cuda/adapter_kernel.py).

A recorded step reads tables that stay where they are: an adapter that comes or leaves changes what is in them. Knows
modules and factors. Does not know rows of a batch.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_worker.adapters.fitting import AdaptedLinear, Adapter

SLOTS = 64
# As cuda/adapter_kernel.py has them: the numbers of a slot, and the most ranks of factors.
_FIELDS = 4
_MOST_RANK = 64
_TRIAL_WIDTH, _TRIAL_OUTPUTS = 300, 200
# Of the largest output: one rounding to bfloat16.
_TOLERANCE = 1e-2
log = logging.getLogger(__name__)


class AdapterSlots:
    """The adapters of a model that kernels add. Others, of another form or beyond SLOTS, are added otherwise."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Factors lie on this device, and have this dtype, as rows have."""
        self._device = device
        self._dtype = dtype
        self._tables: dict[nn.Module, Tensor] = {}
        self._slots: dict[int, int] = {}
        self._works: bool | None = None
        self._held: dict[int, Mapping[nn.Module, AdaptedLinear]] = {}
        # Changes with the modules that have a table: what was recorded before knows fewer of them.
        self.generation = 0

    def add(self, handle: int, adapter: Adapter, linears: Mapping[nn.Module, AdaptedLinear]) -> None:
        """Give an adapter a slot, if it has the form and there is one. `linears` are its placed factors."""
        free = set(range(SLOTS)) - set(self._slots.values())
        if not free or adapter.experts or adapter.embedding is not None or not all(map(self._fits, linears.values())):
            return
        if not self._proven():
            return
        slot = min(free)
        for module, linear in linears.items():
            if module not in self._tables:
                self._tables[module] = torch.zeros(SLOTS, _FIELDS, dtype=torch.int64, device=self._device)
                self.generation += 1
            numbers = linear.a.data_ptr(), linear.b.data_ptr(), len(linear.a), _bits(linear.scale)
            self._tables[module][slot].copy_(torch.tensor(numbers))
        self._held[handle] = linears
        self._slots[handle] = slot

    def drop(self, handle: int) -> None:
        """Forget an adapter. No pass that uses it is in flight."""
        slot = self._slots.pop(handle, None)
        if slot is not None:
            for module in self._held.pop(handle):
                self._tables[module][slot].zero_()

    def has_all(self, handles: NDArray[np.integer[Any]]) -> bool:
        """Whether all of these have slots; 0 is the base model, which needs none."""
        return all(not handle or handle in self._slots for handle in np.unique(handles).tolist())

    def column(self, handles: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Return the slot of each handle, and -1 for the base model."""
        return np.array([self._slots[handle] if handle else -1 for handle in handles.tolist()], np.int32)

    def add_to(self, module: nn.Module, x: Tensor, y: Tensor, column: Tensor) -> None:
        """Add to a module's outputs y [T, out] what the adapters of rows make of its inputs x [T, in], in place."""
        from model_worker.cuda.adapter_kernel import add_low_rank

        table = self._tables.get(module)
        if table is not None:
            add_low_rank(y, x, table, column)

    def _proven(self) -> bool:
        """Whether the kernels give what torch gives, which the first adapter finds out."""
        if self._works is None:
            reason = unsupported(self._device, self._dtype)
            if reason:
                log.warning("adapters are computed group by group, since kernels for them do not work: %s", reason)
            self._works = not reason
        return self._works

    def _fits(self, linear: AdaptedLinear) -> bool:
        plain = linear.gain is None and linear.bias is None and linear.a.dtype == linear.b.dtype == self._dtype
        return plain and len(linear.a) <= _MOST_RANK and linear.a.is_contiguous() and linear.b.is_contiguous()


def unsupported(device: torch.device, dtype: torch.dtype) -> str:
    """Say why a device does not change rows as it should; empty if it does."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pairs = [(drawn(rank, _TRIAL_WIDTH), drawn(_TRIAL_OUTPUTS, rank)) for rank in (3, 40)]
    linears = [AdaptedLinear(*pair, 0.5, None, None) for pair in pairs]
    numbers = [[one.a.data_ptr(), one.b.data_ptr(), len(one.a), _bits(one.scale)] for one in linears]
    column = [1, -1, 0, 1]
    x, y = drawn(len(column), _TRIAL_WIDTH), drawn(len(column), _TRIAL_OUTPUTS)
    want = y.float().clone()
    for row, slot in enumerate(column):
        if slot >= 0:
            one = linears[slot]
            want[row] += one.scale * (x[row].float() @ one.a.float().T @ one.b.float().T)
    try:
        from model_worker.cuda.adapter_kernel import add_low_rank

        add_low_rank(y, x, torch.tensor(numbers, device=device), torch.tensor(column, dtype=torch.int32, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a Triton, a compiler or a card without it
        return str(error).partition("\n")[0] or type(error).__name__
    found = float((y.float() - want).abs().max() / want.abs().max())
    return "" if found <= _TOLERANCE else f"rows are wrong by {found:.2g}"


def _bits(scale: float) -> int:
    found: int = struct.unpack("<i", struct.pack("<f", scale))[0]
    return found
