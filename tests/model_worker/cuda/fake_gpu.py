"""Models on a GPU that is not there: their tensors have shapes, types and a device, and no values.

What a pass launches can be counted, and what would wait for the device raises an error. Triton's kernels are counted
and not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from model_worker.model import LoadedModel

DEVICE = torch.device("cuda:0")


class _ByOperations(TorchFunctionMode):
    """Indexing, copies and `~` as operations of their own: torch's C++ code for them wants a driver."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _item(*args)
        if func is Tensor.__setitem__:
            place, index, value = args
            target = _item(place, index)
            if not isinstance(value, Tensor):
                return target.fill_(value)
            return torch.ops.aten.copy_.default(target, value)
        if func is Tensor.__invert__:
            return torch.ops.aten.bitwise_not.default(*args)
        if func is Tensor.contiguous and not kwargs and not args[0].is_contiguous():
            return torch.ops.aten.clone.default(*args, memory_format=torch.contiguous_format)
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _item(tensor: Tensor, index: Any) -> Tensor:
    """Return tensor[index], by one operation for each dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        used = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (tensor.dim() - used)
    dim = 0
    tensors: dict[int, Tensor] = {}
    for part in parts:
        if part is None:
            tensor = torch.ops.aten.unsqueeze.default(tensor, dim)
            dim += 1
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, Tensor):
            tensors[dim] = part
            dim += 1
        else:
            tensor = torch.ops.aten.select.int(tensor, dim, part)
    if not tensors:
        return tensor
    indices = [tensors.get(i) for i in range(max(tensors) + 1)]
    found: Tensor = torch.ops.aten.index.Tensor(tensor, indices)
    return found


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Make tensors without values within this context, on a device as an H100 is one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    with FakeTensorMode() as mode, _ByOperations(), torch.no_grad():
        yield mode


def moved(loaded: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    """Give the model's modules weights of a type on the fake device, of which those that lie together still do.

    Codes stay of theirs.
    """
    pieces: dict[int, Tensor] = {}

    def fake(real: Tensor, dtype: torch.dtype) -> Tensor:
        storage = real.untyped_storage()
        count = storage.nbytes() // real.element_size()
        key = storage.data_ptr()
        if key not in pieces:
            pieces[key] = torch.empty(count, dtype=dtype, device=DEVICE)
        return pieces[key].as_strided(real.shape, real.stride(), real.storage_offset())

    for module in loaded.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    fake(parameter, dtype if parameter.is_floating_point() else parameter.dtype), requires_grad=False
                )
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(buffer, buffer.dtype)
    attention = loaded.attention
    params = tuple(
        replace(one, sinks=None if one.sinks is None else fake(one.sinks, dtype)) for one in attention.params
    )
    attention = replace(attention, params=params, layout=replace(attention.layout, dtype=dtype))
    return replace(loaded, device=DEVICE, dtype=dtype, attention=attention)
