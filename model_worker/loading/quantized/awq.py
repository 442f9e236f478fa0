"""AWQ: 4-bit codes packed along outputs in an order of its own; a scale and a zero for each group of inputs."""

from __future__ import annotations

from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.bits import (
    WORD_BITS,
    check_scales,
    check_words,
    group_width,
    spread,
    stated_sizes,
    unpack,
)
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import Pool, Stored

_BITS = 4
_PER_WORD = WORD_BITS // _BITS
# Where in a word the code of each of its eight outputs lies.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# Versions whose tensors are packed so; "gemv" packs along inputs.
_VERSIONS = ("gemm", "exllama", "marlin", "")


class AwqWeight(EncodedWeight):
    """A weight [out, in] of qweight i32 [in, out / 8], qzeros i32 [groups, out / 8] and scales [groups, out]."""

    def __init__(self, codes: Stored, zeros: Stored, scales: Stored, width: int) -> None:
        self._codes = codes
        self._zeros = zeros
        self._scales = scales
        self._width = width  # inputs of a group
        self.shape = (codes.shape[1] * _PER_WORD, codes.shape[0])

    def rows(self, first: int, last: int) -> Tensor:
        words = slice(first // _PER_WORD, -(-last // _PER_WORD))
        codes = _in_order(self._codes[:, words])[:, : last - first].t()
        zeros = _in_order(self._zeros[:, words])[:, : last - first].t().float()
        scales = self._scales[:, first:last].float().t()
        inputs = self.shape[1]
        return (codes - spread(zeros, inputs, self._width)) * spread(scales, inputs, self._width)


def _in_order(words: Tensor) -> Tensor:
    """Unpack [n, words] to [n, outputs]."""
    words_of_codes: Tensor = unpack(words, _BITS).unflatten(-1, (-1, _PER_WORD))
    return words_of_codes[..., _PLACES].flatten(-2)


def take_awq(pool: Pool, scheme: Scheme) -> dict[str, EncodedWeight]:
    """Take the weights of this format. ValueError says what in them cannot be read."""
    version = str(scheme.get("version", "gemm")).lower()
    if version not in _VERSIONS:
        raise ValueError(f"{scheme.file} has version {version!r}; of AWQ's, gemm can be read here")
    bits = int(scheme.get("bits", scheme.get("w_bit", _BITS)))
    if bits != _BITS:
        raise ValueError(f"{scheme.file} has bits {bits}; of AWQ's, {_BITS} bits can be read here")
    found: dict[str, EncodedWeight] = {}
    for name in pool:
        module, dot, kind = name.rpartition(".")
        if kind != "qweight":
            continue
        scales = pool.peek(f"{module}.scales")
        zeros = pool.peek(f"{module}.qzeros")
        if scales is None or zeros is None:
            raise ValueError(f"{name} has no {'scales' if scales is None else 'qzeros'} beside it")
        codes = pool.take(name)
        check_words(codes, zeros)
        groups = scales.shape[0]
        outputs = codes.shape[1] * _PER_WORD
        if scales.shape != (groups, outputs) or zeros.shape != (groups, codes.shape[1]):
            raise ValueError(
                f"{name} {list(codes.shape)}, its qzeros {list(zeros.shape)} and scales {list(scales.shape)} do not "
                f"fit {_BITS} bits"
            )
        width = group_width(name, codes.shape[0], groups, stated_sizes(scheme))
        check_scales(pool.take(scales.name))
        pool.take(zeros.name)
        found[f"{module}{dot}weight"] = AwqWeight(codes, zeros, scales, width)
    return found
