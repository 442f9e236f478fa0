"""Puts tensors that were sent to a running server in the place of a checkpoint's own.

Knows names and types of tensors. Does not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from model_worker.loading.stored import Stored, StoredCheckpoint, open_tensors
from model_worker.model import ModelRefused

# Types of numbers that a weight may be sent in, by the names of safetensors.
_FLOATS = ("F64", "F32", "F16", "BF16")


def overlaid(checkpoint: StoredCheckpoint, files: Sequence[Path], architecture: str) -> StoredCheckpoint:
    """Return the checkpoint with the tensors of these files, of which later ones win.

    A plain weight takes the place of a quantized one, with its scales. ModelRefused names the first tensor that cannot
    be used.
    """
    tensors = dict(checkpoint.tensors)
    replaced: set[str] = set()
    for path in files:
        try:
            found = open_tensors(path)
        except ValueError as error:
            raise ModelRefused(architecture, str(error)) from None
        for name, tensor in found.items():
            _check(checkpoint.tensors.get(name), tensor, architecture)
            _forget_codes(tensors, tensor)
            tensors[name] = tensor
            replaced.add(name)
    return StoredCheckpoint(tensors, checkpoint.metadata, frozenset(replaced))


def _check(own: Stored | None, sent: Stored, architecture: str) -> None:
    """Refuse a tensor of another shape or kind than the checkpoint's own."""
    if own is None:
        return
    if own.dtype in _FLOATS and sent.dtype not in _FLOATS:
        raise ModelRefused(
            architecture, f"{sent.name} was sent as {sent.dtype}; send it as one of {', '.join(_FLOATS)}"
        )
    if own.dtype in _FLOATS and own.shape != sent.shape:
        raise ModelRefused(architecture, f"{sent.name} was sent as {list(sent.shape)} and should be {list(own.shape)}")


def _forget_codes(tensors: dict[str, Stored], sent: Stored) -> None:
    """Remove the codes and scales of a quantized weight for which a plain one was sent."""
    layer, _, last = sent.name.rpartition(".")
    if last != "weight" or sent.dtype not in _FLOATS:
        return
    own = tensors.get(sent.name)
    beside = [name for name in tensors if name.startswith(f"{layer}.weight") or name.rpartition(".")[0] == layer]
    if own is not None and own.dtype in _FLOATS and own.shape == sent.shape:
        return
    for name in beside:
        if name != f"{layer}.bias":
            del tensors[name]
