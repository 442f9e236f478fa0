"""Which weights of a checkpoint stay in FP8 on a GPU: those whose products the worker's own card is proven to compute.

Each kind is tried alone, before weights are read. One that fails, gives other numbers or takes longer than decoded
weights is logged and left out. Does not know files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.cuda import fp8_blocks, fp8_linear
from model_worker.cuda.fp8_blocks import BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear

log = logging.getLogger(__name__)


def kept_in_fp8(weights: Mapping[str, EncodedWeight], device: torch.device, architecture: str) -> set[str]:
    """Return the names of those that stay, of the weights of linear layers. The log says why others do not."""
    kept: set[str] = set()
    for kind in (Fp8Linear, BlockFp8Linear):
        of_kind = {name: weight.shape for name, weight in weights.items() if _kind(weight) is kind}
        if not of_kind:
            continue
        if kind is Fp8Linear:
            reason = fp8_linear.unsupported(device)
        else:
            reason = fp8_blocks.unsupported(device)
            if not reason and device.type == "cuda":
                outputs, inputs = max(of_kind.values(), key=math.prod)
                reason = fp8_blocks.slower(device, outputs, inputs)
        if reason:
            log.info("%s: %d weights in FP8 are decoded, since %s", architecture, len(of_kind), reason)
        else:
            kept.update(of_kind)
    if kept:
        said = "%s: %d weights stay in FP8, and the inputs of their products are rounded to FP8 token by token"
        log.info(said, architecture, len(kept))
    return kept


def in_fp8(weight: EncodedWeight, bias: Tensor | None) -> Fp8Linear | BlockFp8Linear:
    """Return a linear layer with a weight that `kept_in_fp8` has named."""
    kind = _kind(weight)
    assert kind is not None
    return kind(*weight.fp8(), bias)


def _kind(weight: EncodedWeight) -> type[Fp8Linear] | type[BlockFp8Linear] | None:
    """Return the kind of layer that takes a weight as it is; None if none does."""
    if not weight.is_fp8 or any(size % fp8_linear.MULTIPLE for size in weight.shape):
        return None
    if weight.fp8_block is None:
        return Fp8Linear
    return BlockFp8Linear if weight.fp8_block == (fp8_blocks.SIDE, fp8_blocks.SIDE) else None
