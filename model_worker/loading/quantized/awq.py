"""AWQ: 4-bit codes packed along outputs in an order of its own; a scale and a zero for each group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.bits import WORD_BITS, group_width, stated_sizes, unpack
from model_worker.loading.quantized.grouped import GroupedWeight, Parts, qweights, take_scales
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import Pool, Stored

_BITS = 4
_PER_WORD = WORD_BITS // _BITS
# Where in a word the code of each of its eight outputs lies.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# Versions whose tensors are packed so; "gemv" packs along inputs.
_VERSIONS = ("gemm", "exllama", "marlin", "")


class AwqWeight(GroupedWeight):
    """A weight [out, in] of qweight i32 [in, out / 8], qzeros i32 [groups, out / 8] and scales [groups, out].

    `width` inputs share a group.
    """

    def __init__(self, codes: Stored, zeros: Stored, scales: Stored, width: int) -> None:
        super().__init__((codes.shape[1] * _PER_WORD, codes.shape[0]), _BITS, width)
        self._codes = codes
        self._zeros = zeros
        self._scales = scales

    def parts(self, first: int, last: int) -> Parts:
        words = slice(first // _PER_WORD, -(-last // _PER_WORD))
        codes, zeros = (_in_order(packed[:, words])[:, : last - first].t() for packed in (self._codes, self._zeros))
        return Parts(codes, zeros.to(torch.int16), self._scales[:, first:last].t())


def _in_order(words: Tensor) -> Tensor:
    """Unpack [n, words] to [n, outputs]."""
    words_of_codes: Tensor = unpack(words, _BITS).unflatten(-1, (-1, _PER_WORD))
    return words_of_codes[..., _PLACES].flatten(-2)


def take_awq(pool: Pool, scheme: Scheme) -> dict[str, EncodedWeight]:
    """Take the weights of this format. ValueError says what in them cannot be read."""
    version = str(scheme.get("version", "gemm")).lower()
    if version not in _VERSIONS:
        raise ValueError(f"{scheme.file} has version {version!r}; of AWQ's, gemm can be read here")
    bits = scheme.number("bits", scheme.number("w_bit", _BITS))
    if bits != _BITS:
        raise ValueError(f"{scheme.file} has bits {bits}; of AWQ's, {_BITS} bits can be read here")
    found: dict[str, EncodedWeight] = {}
    for one in qweights(pool):
        groups = take_scales(pool, one, one.codes.shape[1] * _PER_WORD, _BITS)
        width = group_width(one.codes.name, one.codes.shape[0], groups, stated_sizes(scheme))
        found[one.target] = AwqWeight(one.codes, one.zeros, one.scales, width)
    return found
