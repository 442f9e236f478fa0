"""Numbers of a few bits that are packed into words and bytes, and groups of inputs that share a scale."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import Stored

# Values of the sixteen codes of E2M1, the 4-bit float of MXFP4 and NVFP4.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# Values of the 64 codes of E2M3, the 6-bit float of MXFP6: as many steps of an eighth to 2, then larger ones.
_E2M3 = torch.tensor([code / 8 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 4) for code in range(32)])
E2M3 = torch.cat([_E2M3, -_E2M3])
WORD_BITS = 32
BYTE_BITS = 8
# Fields by which GPTQModel and auto-round give some layers another quantization than the rest.
_LAYERS_OF_THEIR_OWN = ("dynamic", "extra_config")


def check_words(*packed: Stored) -> None:
    """ValueError for packed numbers that are no words of 32 bits."""
    for stored in packed:
        if stored.dtype not in ("I32", "U32"):
            raise ValueError(f"{stored.name} is {stored.dtype}; packed numbers are read from I32: download it anew")


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned numbers of up to 8 bits along the last dimension, the lowest bits first, as uint8.

    They follow one another without gaps, so that some lie in two words, where their bits do not divide a word.
    """
    data = words.contiguous().view(torch.uint8)
    if bits == BYTE_BITS:
        return data
    if BYTE_BITS % bits == 0:
        shifts = range(0, BYTE_BITS, bits)
        parts = torch.stack([(data >> shift) & ((1 << bits) - 1) for shift in shifts], dim=-1)
        return parts.flatten(-2)
    stream: Tensor = torch.stack([data >> place & 1 for place in range(BYTE_BITS)], dim=-1).flatten(-2)
    count = stream.shape[-1] // bits
    numbers = stream[..., : count * bits].unflatten(-1, (count, bits))
    found: Tensor = numbers[..., 0].clone()
    for place in range(1, bits):
        found |= numbers[..., place] << place
    return found


def nibbles(data: Tensor, high_first: bool = False) -> Tensor:
    """Unpack two numbers of each byte along the last dimension, as int32, which may index a table."""
    low = data & 15
    high = data >> 4
    return torch.stack([high, low] if high_first else [low, high], dim=-1).flatten(-2).int()


def spread(scales: Tensor, inputs: int, width: int | None = None) -> Tensor:
    """Repeat [rows, groups] to [rows, inputs]: `width` neighbours share one; the last group may be shorter.

    Without a width the groups are equal.
    """
    rows, groups = scales.shape
    if groups == 1:
        return scales.expand(rows, inputs)
    return scales.repeat_interleave(width or inputs // groups, dim=1)[:, :inputs]


def group_width(name: str, inputs: int, groups: int, stated: Iterable[int]) -> int:
    """Return how many neighbouring inputs of a weight share a scale. ValueError if its scales are not so many.

    One of the stated sizes must give this number of groups; -1 stands for a single group. Without any the groups are
    equal.
    """
    sizes = [size if size > 0 else inputs for size in stated]
    if not sizes and groups > 0 and inputs % groups == 0:
        return inputs // groups
    for size in sizes:
        if -(-inputs // size) == groups:
            return size
    said = f"groups of {' or '.join(map(str, sizes))}, as its config says" if sizes else "equal groups"
    raise ValueError(f"{name} has {inputs} inputs and {groups} groups of scales, which are not {said}")


def stated_sizes(scheme: Scheme) -> list[int]:
    """Return the size of groups that a config names; none where it may name others for some layers."""
    if scheme.get("group_size") is None or any(scheme.get(name) for name in _LAYERS_OF_THEIR_OWN):
        return []
    return [scheme.number("group_size", 0, least=-1)]


def width_of(order: Tensor) -> int | None:
    """Return how many neighbours share a group, by the group of each input; None if these are no neighbours."""
    width = max(1, int((order == 0).sum()))
    return width if torch.equal(order, torch.arange(len(order)) // width) else None


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) of unsigned bytes (E8M0), exact as float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def check_scales(stored: Stored, exponents: bool = False) -> None:
    """ValueError for scales that make no weights: whole numbers (bytes may be `exponents`), all zeros, or values that
    are not finite."""
    if stored.dtype.startswith(("I", "U", "BOOL")) and not (exponents and stored.dtype == "U8"):
        raise ValueError(f"{stored.name} is {stored.dtype}; scales are real numbers: download the file anew")
    values = stored.read().float()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{stored.name} has values that are not finite: download the file anew")
    if not bool(values.any()):
        raise ValueError(f"{stored.name} is all zeros, so that all weights would be zero: download the file anew")
