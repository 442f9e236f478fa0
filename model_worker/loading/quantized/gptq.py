"""GPTQ: codes packed along inputs; a scale and a zero for each group of inputs, which g_idx may permute.

Zeros of version 1 ("gptq") are stored less one, those of version 2 ("gptq_v2") as they are.
"""

from __future__ import annotations

from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.bits import (
    BITS,
    WORD_BITS,
    check_scales,
    check_words,
    group_width,
    spread,
    stated_sizes,
    unpack,
    width_of,
)
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import Pool, Stored

# Values of checkpoint_format, in the order of the zeros that they store: less one, and as they are.
_VERSIONS = ("gptq", "gptq_v2")


class GptqWeight(EncodedWeight):
    """A weight [out, in] of qweight i32 [in * bits / 32, out], qzeros i32 [groups, out * bits / 32], scales
    [groups, out], and the group of each input, or how many neighbours share one."""

    def __init__(self, codes: Stored, zeros: Stored, scales: Stored, groups: Tensor | int, bits: int, first: int):
        self._codes = codes
        self._zeros = zeros
        self._scales = scales
        self._groups = groups
        self._bits = bits
        self._first = first  # what is added to stored zeros
        self.shape = (codes.shape[1], codes.shape[0] * WORD_BITS // bits)

    def rows(self, first: int, last: int) -> Tensor:
        codes = unpack(self._codes[:, first:last].t(), self._bits)
        per_word = WORD_BITS // self._bits
        words = self._zeros[:, first // per_word : -(-last // per_word)]
        zeros = unpack(words, self._bits)[:, : last - first].float().t() + self._first
        scales = self._scales[:, first:last].float().t()
        if isinstance(self._groups, int):
            inputs = self.shape[1]
            return (codes - spread(zeros, inputs, self._groups)) * spread(scales, inputs, self._groups)
        return (codes - zeros[:, self._groups]) * scales[:, self._groups]


def take_gptq(pool: Pool, scheme: Scheme) -> dict[str, EncodedWeight]:
    """Take the weights of this format. ValueError says what in them cannot be read."""
    found: dict[str, EncodedWeight] = {}
    first: int | None = None
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
        outputs = codes.shape[1]
        bits = int(scheme.get("bits", zeros.shape[1] * WORD_BITS // max(1, outputs)))
        if bits not in BITS:
            raise ValueError(
                f"{scheme.file} has bits {bits}; of GPTQ's, {', '.join(map(str, BITS))} bits can be read here"
            )
        inputs = codes.shape[0] * WORD_BITS // bits
        groups = scales.shape[0]
        if zeros.shape != (groups, outputs * bits // WORD_BITS) or scales.shape != (groups, outputs):
            raise ValueError(
                f"{name} {list(codes.shape)}, its qzeros {list(zeros.shape)} and scales {list(scales.shape)} do not "
                f"fit {bits} bits"
            )
        if first is None:
            first = _added_to_zeros(scheme, zeros, bits)
        check_scales(pool.take(scales.name))
        pool.take(zeros.name)
        order = pool.take_if(f"{module}.g_idx")
        shared = (
            group_width(name, inputs, groups, stated_sizes(scheme)) if order is None else _groups(order, inputs, groups)
        )
        found[f"{module}{dot}weight"] = GptqWeight(codes, zeros, scales, shared, bits, first)
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
