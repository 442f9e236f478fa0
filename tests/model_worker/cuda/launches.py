"""Counts what a forward pass would launch on a GPU: Triton's kernels, and torch's operations that compute something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# Operations that launch nothing, although they are no views: memory is taken, or a view has another name.
_NOTHING = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach", "alias")
)
WIDE = 64


class Launches(TorchDispatchMode):
    """The names of launches, in order; what made a float64 tensor of more than `wide` elements; and what copied from
    the host, which a recording cannot."""

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self._wide = wide
        self.names: list[str] = []
        self.wide_doubles: list[str] = []
        self.from_host: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":  # it asks for a fact
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # Made of others, which are what is launched.
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        result = func(*args, **kwargs)
        name = func._schema.name
        if not func.is_view and name not in _NOTHING:
            self.names.append(name)
        devices = {
            leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        if "cpu" in devices and any(isinstance(one, torch.Tensor) and one.is_cuda for one in tree_leaves(result)):
            self.from_host.append(name)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 and leaf.numel() > self._wide:
                self.wide_doubles.append(name)
        return result


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch, run: bool = True, wide: int = WIDE) -> Iterator[Launches]:
    """Count within this context. Without `run` Triton's kernels are counted only, as fake tensors want it."""
    from triton.runtime.interpreter import InterpretedFunction

    launches = Launches(wide)
    interpret = InterpretedFunction.run

    def count(self: Any, *arguments: Any, **named: Any) -> None:
        launches.names.append(self.__name__)
        if run:
            with _disable_current_modes():
                interpret(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", count)
        with launches:
            yield launches
