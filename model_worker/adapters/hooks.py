"""Adapters on a model's own modules: hooks that add to the outputs of the adapted ones, for the rows of a pass.

Rows are grouped by adapter once in a pass; a hook multiplies each group by the two small matrices of its module. Rows
of the base model are not touched. Kernels take all rows of a module at once, each by the slot of its adapter. Knows
modules and the rows of a batch. Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, local
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from model_worker.adapters.experts import ARGUMENTS, AdaptedExperts, adapted_experts
from model_worker.adapters.fitting import AdaptedEmbedding, AdaptedLinear, Adapter
from model_worker.adapters.slots import AdapterSlots
from model_worker.batch import ForwardBatch
from model_worker.recurrent.mixers import tokens_in_progress

T = TypeVar("T")


class _Rows(NamedTuple):
    """The rows of one adapter in a pass."""

    handle: int
    tokens: Tensor | slice  # i64: of all tokens
    wanted: Tensor | slice  # i64: of those whose logits are wanted


class AdapterHooks:
    """The adapters of one model, whose modules compute them within `rows`."""

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, kernels: bool = False) -> None:
        """With `kernels` rows are changed by Triton's, where these can."""
        self._device = device
        # CPUs multiply half precision slowly, or not at all.
        self._dtype = torch.float32 if device.type == "cpu" else dtype
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        # Adapters come in one thread and leave in another.
        self._lock = Lock()
        self._linears: dict[nn.Module, dict[int, AdaptedLinear]] = {}
        self._embeddings: dict[int, AdaptedEmbedding] = {}
        self._experts: dict[nn.Module, dict[int, AdaptedExperts]] = {}
        self._hooks: dict[nn.Module, RemovableHandle] = {}
        # Of each thread: images are encoded beside passes.
        self._local = local()
        self.slots = AdapterSlots(device, self._dtype, self._embedding) if kernels else None

    @property
    def _rows(self) -> list[_Rows]:
        found: list[_Rows] = getattr(self._local, "rows", [])
        return found

    @property
    def _columns(self) -> tuple[Tensor, Tensor] | None:
        """The slots of tokens, and of those whose logits are wanted."""
        found: tuple[Tensor, Tensor] | None = getattr(self._local, "columns", None)
        return found

    def add(self, handle: int, adapter: Adapter) -> int:
        """Keep an adapter, in place of what the handle had. Returns its bytes. May run beside a pass that does not use
        it. An error, such as torch.OutOfMemoryError, leaves nothing of it."""
        # Before it is on the device, which may have no room for both.
        laid_out = adapter if self.slots is None else self.slots.laid_out(adapter)
        placed = laid_out.placed(self._device, self._dtype)
        with self._lock:
            self._drop(handle)
            try:
                self._keep(handle, placed)
            except BaseException:
                self._drop(handle)
                raise
        return placed.nbytes

    def drop(self, handle: int) -> None:
        """Forget an adapter."""
        with self._lock:
            self._drop(handle)

    @contextmanager
    def rows(self, batch: ForwardBatch) -> Iterator[None]:
        """Compute the rows of a batch with their adapters, within this context."""
        if batch.adapters is None:
            yield
            return
        handles = token_adapters(batch)
        if self.slots is not None and self.slots.has_all(batch.adapters):
            column = torch.from_numpy(self.slots.column(handles)).to(self._device)
            with self.in_slots(column, batch.logit_positions):
                yield
            return
        wanted = handles[batch.logit_positions.cpu().numpy() if batch.wanted is None else batch.wanted]
        self._local.rows = [
            _Rows(handle, self._indices(handles == handle), self._indices(wanted == handle))
            for handle in np.unique(handles).tolist()
            if handle
        ]
        try:
            yield
        finally:
            self._local.rows = []

    @contextmanager
    def in_slots(self, column: Tensor, logit_positions: Tensor) -> Iterator[None]:
        """Change tokens that have these slots, i32[T], by kernels, within this context."""
        self._local.columns = column, column[logit_positions]
        try:
            yield
        finally:
            self._local.columns = None

    @property
    def in_kernels(self) -> bool:
        """Whether kernels change the rows of this context."""
        return self._columns is not None

    def change(self, modules: Sequence[nn.Module], x: Tensor, y: Tensor) -> None:
        """Change the outputs y [T, out] of modules, side by side, for their inputs x [T, in], in place."""
        assert self.slots is not None
        assert self._columns is not None
        widths = [int(module.out_features) for module in modules]  # type: ignore[arg-type]
        for module, part in zip(modules, y.split(widths, 1), strict=True):
            self.slots.add_to(module, x, part, self._columns[0])

    @contextmanager
    def all_rows(self, handle: int) -> Iterator[None]:
        """Compute all rows with one adapter, within this context."""
        self._local.rows = [_Rows(handle, slice(None), slice(None))]
        try:
            yield
        finally:
            self._local.rows = []

    def _keep(self, handle: int, placed: Adapter) -> None:
        for module, linear in placed.linears.items():
            self._linears.setdefault(module, {})[handle] = linear
            self._hook(module, self._change_linear)
        for module, layer in placed.experts.items():
            self._experts.setdefault(module, {})[handle] = layer
            if module not in self._hooks:
                self._hooks[module] = module.register_forward_hook(self._change_experts, with_kwargs=True)
        if placed.embedding is not None:
            self._embeddings[handle] = placed.embedding
            self._hook(self._embedding, self._change_embedding)
        # Last: steps are recorded anew then, with these hooks.
        if self.slots is not None:
            self.slots.add(handle, placed)

    def _drop(self, handle: int) -> None:
        if self.slots is not None:
            self.slots.drop(handle)
        self._drop_from(self._linears, handle)
        self._drop_from(self._experts, handle)
        if self._embeddings.pop(handle, None) is not None and not self._embeddings:
            self._hooks.pop(self._embedding).remove()

    def _hook(self, module: nn.Module, change: Callable[[nn.Module, Any, Tensor], Tensor | None]) -> None:
        if module not in self._hooks:
            self._hooks[module] = module.register_forward_hook(change)

    def _drop_from(self, held: dict[nn.Module, dict[int, T]], handle: int) -> None:
        for module, adapters in list(held.items()):
            adapters.pop(handle, None)
            if not adapters:
                del held[module]
                self._hooks.pop(module).remove()

    def _indices(self, chosen: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.flatnonzero(chosen)).to(self._device)

    def _change_linear(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
        if self._columns is not None and self.slots is not None:
            given = arguments[0].reshape(-1, arguments[0].shape[-1]).contiguous()
            changed = output.reshape(-1, output.shape[-1]).contiguous()
            is_head = module is self._head
            column = self._columns[is_head]
            own = None if is_head else tokens_in_progress()
            self.slots.add_to(module, given, changed, column if own is None else column[own])
            return changed.reshape(output.shape)
        linears = self._linears.get(module, {})
        used = [(rows, linears[rows.handle]) for rows in self._rows if rows.handle in linears]
        if not used:
            return None
        x = arguments[0].reshape(-1, arguments[0].shape[-1])
        scales = getattr(module, "input_scales", None)
        if scales is not None:
            # The module has multiplied its inputs.
            x = x / scales
        y = output.reshape(-1, output.shape[-1]).clone()
        for rows, linear in used:
            index = rows.wanted if module is self._head else _given(rows.tokens)
            y[index] = _adapted(module, linear, x[index], y[index])
        return y.reshape(output.shape)

    def _change_experts(
        self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        held = self._experts.get(module, {})
        used = [(rows, held[rows.handle]) for rows in self._rows if rows.handle in held]
        if not used:
            return None
        given = dict(zip(ARGUMENTS, arguments, strict=False)) | named
        x, chosen, weights = (given[name].reshape(-1, given[name].shape[-1]) for name in ARGUMENTS)
        y = output.reshape(-1, output.shape[-1]).clone()
        for rows, layer in used:
            index = rows.tokens
            y[index] = adapted_experts(module, layer, x[index], chosen[index], weights[index]).to(y.dtype)
        return y.reshape(output.shape)

    def _change_embedding(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
        if self._columns is not None and self.slots is not None:
            changed = output.reshape(-1, output.shape[-1]).contiguous()
            self.slots.add_to_vectors(module, arguments[0].reshape(-1).contiguous(), changed, self._columns[0])
            return changed.reshape(output.shape)
        used = [(rows, self._embeddings[rows.handle]) for rows in self._rows if rows.handle in self._embeddings]
        if not used:
            return None
        tokens = arguments[0].reshape(-1)
        y = output.reshape(-1, output.shape[-1]).clone()
        for rows, embedding in used:
            added = embedding.scale * (embedding.a[tokens[rows.tokens]] @ embedding.b.T).float()
            y[rows.tokens] = (y[rows.tokens].float() + added).to(y.dtype)
        return y.reshape(output.shape)


def _given(tokens: Tensor | slice) -> Tensor | slice:
    """Return the places of packed tokens among those that modules are given now: mixers compute some at a time."""
    given = tokens_in_progress()
    if given is None or isinstance(tokens, slice):
        return tokens
    if isinstance(given, slice):
        first, last = given.start or 0, given.stop
        return tokens if last is None else tokens[(tokens >= first) & (tokens < last)] - first
    return torch.isin(given, tokens).nonzero().squeeze(1)


def token_adapters(batch: ForwardBatch) -> NDArray[np.integer[Any]]:
    """Return the handle of each token's adapter, for a batch that has some."""
    assert batch.adapters is not None
    if batch.num_tokens == batch.num_sequences:
        return batch.adapters
    return np.repeat(batch.adapters, np.diff(batch.query_start.cpu().numpy()))


def _adapted(module: nn.Module, linear: AdaptedLinear, x: Tensor, y: Tensor) -> Tensor:
    """Return the outputs y of a module, for the inputs x, as the adapter changes them."""
    added = linear.scale * ((x.to(linear.a.dtype) @ linear.a.T) @ linear.b.T).float()
    exact = y.float()
    if linear.gain is None:
        exact = exact + added
    else:
        own = module.bias
        bias = own.float() if isinstance(own, Tensor) else 0.0
        exact = linear.gain * (exact - bias + added) + bias
    if linear.bias is not None:
        exact = exact + linear.bias
    return exact.to(y.dtype)
