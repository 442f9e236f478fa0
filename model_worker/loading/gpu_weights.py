"""Which weights of a checkpoint stay encoded on a GPU: those whose products the worker's own card is proven to compute.

Each kind is tried alone, before weights are read. One that fails, gives other numbers or takes longer than decoded
weights is logged and left out. Does not know files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.cuda.encoded_experts import PROJECTIONS, put_stacks, takes
from model_worker.loading.gpu_kinds import Kind, kind_of

log = logging.getLogger(__name__)

# Experts of a token, where a model does not say it.
_EXPERTS_OF_TOKEN = 8


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
    # What is left out of these, and why.
    reasons = _apart(found, weights)
    right: dict[str, Kind] = {}
    for kind, names in _by_kind(found, reasons).items():
        reason = _unsupported(kind, [weights[name] for name in names], _experts_of_token(skeleton), device, dtype)
        if reason:
            reasons.update(dict.fromkeys(names, reason))
        else:
            right.update(dict.fromkeys(names, kind))
    reasons.update(_apart(right, weights))
    _log(found, reasons, weights, architecture, dtype)
    return {name: kind for name, kind in right.items() if name not in reasons}


def _by_kind(kinds: Mapping[str, Kind], but: Container[str] = ()) -> dict[Kind, list[str]]:
    by_kind: dict[Kind, list[str]] = {}
    for name, kind in kinds.items():
        if name not in but:
            by_kind.setdefault(kind, []).append(name)
    return by_kind


def _log(
    found: Mapping[str, Kind],
    reasons: Mapping[str, str],
    weights: Mapping[str, EncodedWeight],
    architecture: str,
    dtype: torch.dtype,
) -> None:
    """Say which weights stay, and which are decoded, for these reasons, although their kinds are known."""
    for kind, names in _by_kind(found).items():
        kept = [name for name in names if name not in reasons]
        if kept:
            how = ", and the inputs of their products are rounded to FP8 token by token" if kind.rounds else ""
            log.info("%s: %d weights stay %s%s", architecture, len(kept), kind.name, how)
        for reason in dict.fromkeys(reasons[name] for name in names if name in reasons):
            decoded = [name for name in names if reasons.get(name) == reason]
            size = sum(math.prod(weights[name].shape) for name in decoded) * dtype.itemsize / 1e9
            said = "%s: %d weights %s are decoded, which takes %.2f GB, since %s"
            log.info(said, architecture, len(decoded), kind.name, size, reason)


def _experts_of_token(skeleton: Any) -> int:
    """Return how many experts a token has in a model."""
    config = getattr(skeleton, "config", None)
    found = None if config is None else getattr(config.get_text_config(), "num_experts_per_tok", None)
    return found if isinstance(found, int) else _EXPERTS_OF_TOKEN


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


def _apart(kinds: Mapping[str, Kind], weights: Mapping[str, EncodedWeight]) -> dict[str, str]:
    """Return the experts of which another projection is decoded, and that reason."""
    apart = {}
    for name in kinds:
        owner = name.rpartition(".")[0]
        others = [projection for projection in PROJECTIONS if f"{owner}.{projection}" not in kinds]
        if weights[name].experts and others:
            apart[name] = f"{' and '.join(others)} of the same experts is decoded"
    return apart


def _unsupported(
    kind: Kind, weights: list[EncodedWeight], chosen: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Say why weights of a kind are decoded: a product is wrong, or slower; empty if none is."""
    by_size = sorted(weights, key=lambda weight: math.prod(weight.shape))
    reason = kind.unsupported([by_size[0], by_size[-1]], device, dtype)
    if reason or device.type != "cuda":
        return reason
    return kind.slower(by_size[-1], chosen, device, dtype)
