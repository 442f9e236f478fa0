"""Recognises the formats in a checkpoint's tensors, and gives its weights: encoded ones, and plain ones as stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.awq import take_awq
from model_worker.loading.quantized.bitsandbytes import take_4bit
from model_worker.loading.quantized.compressed import take_compressed
from model_worker.loading.quantized.compressed_config import check_compressed
from model_worker.loading.quantized.gptq import take_gptq
from model_worker.loading.quantized.scaled import FP8, take_fp8, take_int8
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.quantized.small_floats import take_experts, take_modelopt
from model_worker.loading.quantized.torchao import take_torchao
from model_worker.loading.stored import Pool, Stored, StoredCheckpoint
from model_worker.model import first_line

# Types of whole numbers that quantized weights are stored in.
_CODES = ("I8", "U8", "I16", "U16", "I32", "U32")
# Ends of the names of tensors that belong to a quantized weight.
_MARKS = (
    ".qweight",
    ".qzeros",
    ".SCB",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
)
# Ends that plain tensors have, too (Gemma's per_dim_scale): those beside a tensor of the same name, with another end,
# belong to a quantized weight.
_PARTNERS = {
    "_blocks": ("_scales",),
    "_packed": ("_scale", "_shape"),
    "_scale": ("", "_packed"),
    "_scale_inv": ("",),
    "_scale_2": ("", "_packed"),
    ".weight_scales": (".weight",),
}
# Scales of activations, and of K and V: these are not rounded here, so they are not needed.
_UNUSED = (
    ".activation_scale",
    "_activation_scale",
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".kv_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
)


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights under the names that they have without quantization. `method` is empty where none is quantized."""

    method: str
    encoded: dict[str, EncodedWeight]
    plain: dict[str, Stored]
    unused: list[str] = field(default_factory=list)


def is_quantized(checkpoint: StoredCheckpoint, scheme: Scheme) -> bool:
    """Whether files or tensors say that weights are quantized, or may be: there are matrices of whole numbers."""
    tensors = checkpoint.tensors
    return bool(scheme.method) or any(
        _is_mark(tensor, tensors) or (len(tensor.shape) > 1 and tensor.dtype in _CODES) for tensor in tensors.values()
    )


def _is_mark(tensor: Stored, tensors: Mapping[str, Stored]) -> bool:
    name = tensor.name
    if tensor.dtype in FP8 or ".quant_state." in name or name.endswith(_MARKS):
        return True
    return any(
        name.endswith(end) and any(f"{name.removesuffix(end)}{other}" in tensors for other in others)
        for end, others in _PARTNERS.items()
    )


def read_weights(checkpoint: StoredCheckpoint, scheme: Scheme) -> Weights:
    """Give each tensor its meaning. ValueError names the first that cannot be read, before any weight is."""
    pool = Pool(checkpoint.tensors)
    try:
        return _read(checkpoint, scheme, pool)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # Shapes and values that no format has.
        found = checkpoint.tensors.get(pool.last)
        named = f"{found.name} ({found.dtype} {list(found.shape)})" if found else "a tensor"
        raise ValueError(
            f"{named} or one beside it is malformed: {first_line(error)}; download the files anew"
        ) from error


def _read(checkpoint: StoredCheckpoint, scheme: Scheme, pool: Pool) -> Weights:
    for name in pool:
        if name.endswith(_UNUSED):
            pool.leave_unused(name)
    method = scheme.method
    encoded: dict[str, EncodedWeight] = {}
    if method == "auto-round":
        method = _packing(scheme)
    if method == "compressed-tensors":
        check_compressed(scheme)
    if method == "torchao":
        encoded |= take_torchao(pool, checkpoint.metadata)
    if method == "awq" or (not method and _packed_along_outputs(checkpoint.tensors.values())):
        encoded |= take_awq(pool, scheme)
    elif method in ("gptq", ""):
        encoded |= take_gptq(pool, scheme)
    # The names of the others tell them apart.
    encoded |= take_4bit(pool)
    encoded |= take_int8(pool)
    encoded |= take_experts(pool, scheme)
    encoded |= take_modelopt(pool)
    encoded |= take_compressed(pool, scheme)
    encoded |= take_fp8(pool, scheme)
    # Whatever scales a layer with such a weight, shifts it or orders it belongs to it, if nothing says otherwise.
    layers = {key.rpartition(".")[0] for key in encoded}
    parts = {name for name in pool if name.rpartition(".")[0] in layers and _is_part(name.rpartition(".")[2])}
    left = pool.left
    if rest := [left[name] for name in left if name in parts or _is_mark(left[name], checkpoint.tensors)]:
        said = f"quant_method {method!r} of {scheme.file}" if method else "no file names a quantization, and"
        raise ValueError(
            f"{len(rest)} tensors of quantized weights cannot be read, such as {rest[0].name} ({rest[0].dtype} "
            f"{list(rest[0].shape)}): {said} does not say how their values are meant"
        )
    return Weights(method, encoded, pool.left, pool.unused)


def _is_part(end: str) -> bool:
    return end == "g_idx" or any(part in end for part in ("_scale", "_zero_point", "_g_idx"))


def _packing(scheme: Scheme) -> str:
    """Return the method whose layout an export of auto-round has. ValueError for another."""
    packing = str(scheme.get("packing_format", "auto_round:auto_gptq")).lower()
    for method in ("gptq", "awq"):
        if method in packing:
            return method
    raise ValueError(
        f"{scheme.file} names packing_format {packing!r}; those of auto_gptq and auto_awq can be read here"
    )


def _packed_along_outputs(tensors: Iterable[Stored]) -> bool:
    """Whether packed weights that no file describes are AWQ's: as many words as zeros have, and no g_idx."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for name, tensor in by_name.items():
        module, _, kind = name.rpartition(".")
        zeros = by_name.get(f"{module}.qzeros")
        if kind == "qweight" and zeros is not None:
            return f"{module}.g_idx" not in by_name and zeros.shape[1:] == tensor.shape[1:]
    return False
