"""GPTQ: codes packed along inputs; a scale and a zero for each group of inputs, which g_idx may permute.

Zeros of version 1 ("gptq") are stored less one, those of version 2 ("gptq_v2") as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.bits import WORD_BITS, group_width, stated_sizes, unpack, width_of
from model_worker.loading.quantized.grouped import GroupedWeight, Parts, qweights, take_scales
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import Pool, Stored

# Values of checkpoint_format, in the order of the zeros that they store: less one, and as they are.
_VERSIONS = ("gptq", "gptq_v2")
# Those of 5 to 7 bits are stored in planes.
_BITS = (2, 3, 4, 8)


class GptqWeight(GroupedWeight):
    """A weight [out, in] of qweight i32 [in * bits / 32, out], qzeros i32 [groups, out * bits / 32], scales
    [groups, out], and the group of each input, or how many neighbours share one."""

    def __init__(self, codes: Stored, zeros: Stored, scales: Stored, groups: Tensor | int, bits: int, first: int):
        super().__init__((codes.shape[1], codes.shape[0] * WORD_BITS // bits), bits, groups)
        self._codes = codes
        self._zeros = zeros
        self._scales = scales
        self._first = first  # what is added to stored zeros

    def parts(self, first: int, last: int) -> Parts:
        codes = unpack(self._codes[:, first:last].t(), self._bits)
        words = self._zeros[:, first * self._bits // WORD_BITS : -(-last * self._bits // WORD_BITS)]
        zeros = unpack(words, self._bits)[:, : last - first].t().to(torch.int16) + self._first
        return Parts(codes, zeros, self._scales[:, first:last].t())


def take_gptq(pool: Pool, scheme: Scheme) -> dict[str, EncodedWeight]:
    """Take the weights of this format. ValueError says what in them cannot be read."""
    found: dict[str, EncodedWeight] = {}
    first: int | None = None
    for one in qweights(pool):
        outputs = one.codes.shape[1]
        bits = scheme.number("bits", one.zeros.shape[1] * WORD_BITS // max(1, outputs), least=0)
        if bits not in _BITS:
            raise ValueError(
                f"{scheme.file} has bits {bits}; of GPTQ's, {', '.join(map(str, _BITS))} bits can be read here"
            )
        inputs = one.codes.shape[0] * WORD_BITS // bits
        groups = take_scales(pool, one, outputs, bits)
        if first is None:
            first = _added_to_zeros(scheme, one.zeros, bits)
        order = pool.take_if(f"{one.module}g_idx")
        if order is None:
            if scheme.get("desc_act") and groups > 1:
                raise ValueError(
                    f"{one.codes.name} has no g_idx beside it, and {scheme.file} has desc_act, so that the order of "
                    "its inputs is unknown: download the files anew"
                )
            shared: Tensor | int = group_width(one.codes.name, inputs, groups, stated_sizes(scheme))
        else:
            shared = _groups(order, inputs, groups)
        found[one.target] = GptqWeight(one.codes, one.zeros, one.scales, shared, bits, first)
    return found


def _added_to_zeros(scheme: Scheme, zeros: Stored, bits: int) -> int:
    """Return what is added to stored zeros: 1 in version 1 of the format. ValueError for other formats."""
    if scheme.method:
        version = str(scheme.get("checkpoint_format", _VERSIONS[0]))
        if version not in _VERSIONS or scheme.get("is_marlin_format"):
            raise ValueError(
                f"{scheme.file} names checkpoint_format {version!r} of GPTQ; {' and '.join(_VERSIONS)} can be read here"
            )
        return 1 - _VERSIONS.index(version)
    middle = 1 << (bits - 1)
    stored = set(unpack(zeros.read(), bits).unique().tolist())
    if stored not in ({middle}, {middle - 1}):
        raise ValueError(
            f"no file says the version of GPTQ, and {zeros.name} does not show it: add "
            '"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq" or "gptq_v2"} to config.json'
        )
    return middle - int(stored.pop())


def _groups(order: Stored, inputs: int, groups: int) -> Tensor | int:
    """Return the group of each input, or how many neighbours share one."""
    if order.shape != (inputs,):
        raise ValueError(f"{order.name} has shape {list(order.shape)} and should have {[inputs]}")
    found = order.read().long()
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise ValueError(f"{order.name} names group {int(found.max())} or {int(found.min())}; there are {groups}")
    return width_of(found) or found
