"""torchao's tensors in safetensors: a file's metadata has each weight's class, and the file its arrays.

Classes that keep one number for each weight, unpacked, are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.scaled import ScaledWeight, scales_of
from model_worker.loading.stored import Pool, Stored
from shared.json_files import parse_json

CLASSES = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")


def take_torchao(pool: Pool, metadata: Mapping[str, str]) -> dict[str, EncodedWeight]:
    """Take the weights of this format. ValueError names the class of one that cannot be read."""
    found: dict[str, EncodedWeight] = {}
    for name, text in metadata.items():
        described = _described(text)
        kind = str(described.get("_type", ""))
        if not kind or kind == "Tensor":
            continue
        if kind not in CLASSES:
            raise ValueError(f"{name} is torchao's {kind}; of its classes, {', '.join(CLASSES)} can be read here")
        numbers = _part(pool, name, "qdata")
        scale = _part(pool, name, "scale")
        if numbers is None or scale is None or len(numbers.shape) != 2:
            raise ValueError(f"{name} is torchao's {kind} and has no matrix of qdata and scale in the file")
        scales, block = scales_of(scale, numbers, None)
        zero = _part(pool, name, "zero_point")
        if zero is None and "zero_point" in (described.get("_tensor_data_names") or ()):
            raise ValueError(f"{name} is torchao's {kind} and has no zero_point in the file: download the files anew")
        zeros = None if zero is None else zero.read().float().reshape(scales.shape)
        found[name] = ScaledWeight(numbers, scales, zeros, block)
    return found


def _described(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _part(pool: Pool, name: str, part: str) -> Stored | None:
    """Take an array of a weight; versions of torchao join the names by one mark or another."""
    module, dot, last = name.rpartition(".")
    for key in (f"{name}:{part}", f"{name}_{part}", f"{module}{dot}_{last}_{part}"):
        if key in pool:
            return pool.take(key)
    return None
