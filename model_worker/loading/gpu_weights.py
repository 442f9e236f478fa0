"""Which weights of a checkpoint stay encoded on a GPU: those whose products the worker's own card is proven to compute.

Each kind is tried alone, before weights are read. One that fails, gives other numbers or takes longer than decoded
weights is logged and left out. Does not know files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.cuda.encoded_experts import PROJECTIONS, put_stacks, takes
from model_worker.loading.gpu_kinds import Kind, kind_of

log = logging.getLogger(__name__)


def kept_on_gpu(
    weights: Mapping[str, EncodedWeight],
    skeleton: nn.Module,
    device: torch.device,
    architecture: str,
    dtype: torch.dtype,
    rounds_inputs: bool,
) -> dict[str, Kind]:
    """Return those that stay, of the weights of linear layers and of experts. The log says why others do not.

    `weights` have the names of linear modules, and of experts' tensors, in a model of which `skeleton` has the modules.
    Decoded ones, and what is multiplied, are of `dtype`. FP8 stays if the checkpoint `rounds_inputs`, too.
    """
    found: dict[str, Kind] = {}
    for name, weight in weights.items():
        fits = not weight.experts or takes(skeleton.get_submodule(name.rpartition(".")[0]))
        if fits and (kind := kind_of(weight, rounds_inputs, dtype)) is not None:
            found[name] = kind
    by_kind: dict[Kind, list[str]] = {}
    for name, kind in _whole(found, weights).items():
        by_kind.setdefault(kind, []).append(name)
    kept: dict[str, Kind] = {}
    for kind, names in by_kind.items():
        of_kind = [weights[name] for name in names]
        reason = _unsupported(kind, of_kind, device, dtype)
        if reason:
            size = sum(math.prod(weight.shape) for weight in of_kind) * dtype.itemsize / 1e9
            said = "%s: %d weights %s are decoded, which takes %.2f GB, since %s"
            log.info(said, architecture, len(names), kind.name, size, reason)
            continue
        kept.update(dict.fromkeys(names, kind))
        how = ", and the inputs of their products are rounded to FP8 token by token" if kind.rounds else ""
        log.info("%s: %d weights stay %s%s", architecture, len(names), kind.name, how)
    return _whole(kept, weights)


def place_on_gpu(model: nn.Module, weights: Mapping[str, EncodedWeight], kinds: Mapping[str, Kind]) -> None:
    """Put layers with these weights in their places in a model. Those of experts are all of a module's."""
    stacks: dict[str, dict[str, Any]] = {}
    for name, kind in kinds.items():
        weight = weights[name]
        if weight.experts:
            owner, _, projection = name.rpartition(".")
            stacks.setdefault(owner, {})[projection] = kind.layer(weight, None)
        else:
            linear: Any = model.get_submodule(name)
            model.set_submodule(name, kind.layer(weight, linear.bias))
    for owner, found in stacks.items():
        put_stacks(model.get_submodule(owner), [found[projection] for projection in PROJECTIONS])


def _whole(kinds: Mapping[str, Kind], weights: Mapping[str, EncodedWeight]) -> dict[str, Kind]:
    """Leave out experts of which another projection is decoded."""

    def is_whole(name: str) -> bool:
        owner = name.rpartition(".")[0]
        return not weights[name].experts or all(f"{owner}.{projection}" in kinds for projection in PROJECTIONS)

    return {name: kind for name, kind in kinds.items() if is_whole(name)}


def _unsupported(kind: Kind, weights: list[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
    """Say why weights of a kind are decoded: a product is wrong, or slower; empty if none is."""
    by_size = sorted(weights, key=lambda weight: math.prod(weight.shape))
    reason = kind.unsupported([by_size[0], by_size[-1]], device, dtype)
    if reason or device.type != "cuda":
        return reason
    outputs, inputs = by_size[-1].shape[-2:]
    return kind.slower(device, outputs, inputs, dtype)
