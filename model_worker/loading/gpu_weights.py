"""Which weights of a checkpoint stay encoded on a GPU: those whose products the worker's own card is proven to compute.

Each kind is tried alone, before weights are read. One that fails, gives other numbers or takes longer than decoded
weights is logged and left out. Does not know files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.gpu_kinds import IN_BLOCKS, PER_OUTPUT, Kind, kind_of

log = logging.getLogger(__name__)


def kept_on_gpu(
    weights: Mapping[str, EncodedWeight],
    device: torch.device,
    architecture: str,
    dtype: torch.dtype,
    rounds_inputs: bool,
) -> dict[str, Kind]:
    """Return those that stay, of the weights of linear layers. The log says why others do not.

    Decoded ones, and what is multiplied, are of `dtype`. FP8 stays if the checkpoint `rounds_inputs`, too.
    """
    by_kind: dict[Kind, list[str]] = {}
    for name, weight in weights.items():
        if (kind := kind_of(weight, rounds_inputs)) is not None:
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
        rounded = kind in (PER_OUTPUT, IN_BLOCKS)
        how = ", and the inputs of their products are rounded to FP8 token by token" if rounded else ""
        log.info("%s: %d weights stay %s%s", architecture, len(names), kind.name, how)
    return kept


def _unsupported(kind: Kind, weights: list[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
    """Say why weights of a kind are decoded: a product is wrong, or slower; empty if none is."""
    by_size = sorted(weights, key=lambda weight: math.prod(weight.shape))
    reason = kind.unsupported([by_size[0], by_size[-1]], device, dtype)
    if reason or device.type != "cuda":
        return reason
    outputs, inputs = by_size[-1].shape
    return kind.slower(device, outputs, inputs, dtype)
