"""The parts of LoRA adapters that change how images are encoded: linear layers of the vision tower and the projector.

Features of an image belong to the content of what changed them: adapters without such a part share those of the model
itself. Adapters come and go in other threads than images are encoded in. Knows handles, contents and modules. Does not
know images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_worker.adapters.fitting import AdaptedLinear, Adapter
from model_worker.adapters.hooks import AdapterHooks


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """An adapter that has come."""

    content: str  # its digest, if it changes features; else empty


class TowerAdapters:
    """The adapters of one encoder, by handle. `modules` are those that they may change, by their names in files."""

    def __init__(
        self, composite: Any, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.modules = modules
        # Called in any thread when an adapter has come.
        self.came: Callable[[], None] = lambda: None
        self._hooks = AdapterHooks(composite, device, dtype)
        self._known: dict[int, _Known] = {}

    def add(self, handle: int, digest: str, linears: dict[nn.Module, AdaptedLinear]) -> int:
        """Keep what an adapter changes here, perhaps nothing. Returns its bytes."""
        size = self._hooks.add(handle, Adapter(digest, 0, linears, None)) if linears else 0
        self._known[handle] = _Known(digest if linears else "")
        self.came()
        return size

    def drop(self, handle: int) -> None:
        """Forget an adapter. Nothing happens for an unknown handle."""
        known = self._known.pop(handle, None)
        if known is not None and known.content:
            self._hooks.drop(handle)

    def knows(self, handle: int) -> bool:
        """Whether an adapter has come; 0 stands for none, which is always there."""
        return not handle or handle in self._known

    def content(self, handle: int) -> str:
        """Return the content to which features belong; empty for those of the model itself."""
        known = self._known.get(handle)
        return "" if known is None else known.content

    @contextmanager
    def rows(self, handle: int, content: str) -> Iterator[None]:
        """Encode with an adapter of this content, within this context. ValueError if it was not there all the time."""
        if not content:
            yield
            return
        known = self._known.get(handle)
        if known is None or known.content != content:
            raise ValueError("its adapter has left memory")
        with self._hooks.all_rows(handle):
            yield
        if self._known.get(handle) is not known:
            raise ValueError("its adapter has left memory meanwhile")
