"""Recognises the formats in a checkpoint's tensors, and gives its weights: encoded ones, and plain ones as stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.awq import take_awq
from model_worker.loading.quantized.bitsandbytes import take_4bit
from model_worker.loading.quantized.compressed import check_compressed, take_compressed
from model_worker.loading.quantized.float4 import take_experts, take_modelopt
from model_worker.loading.quantized.gptq import take_gptq
from model_worker.loading.quantized.scaled import FP8, take_fp8, take_int8
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.quantized.torchao import take_torchao
from model_worker.loading.stored import Pool, Stored, StoredCheckpoint

# Ends of the names of tensors that belong to a quantized weight.
_MARKS = (
    ".qweight",
    ".qzeros",
    ".SCB",
    "_packed",
    "_blocks",
    "_scale",
    "_scale_inv",
    "_scale_2",
    ".weight_scales",
)
# Scales of activations, and of K and V: these are not rounded here, so they are not needed.
_UNUSED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
    ".pre_quant_scale_inv",
)


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights under the names that they have without quantization. `method` is empty where none is quantized."""

    method: str
    encoded: dict[str, EncodedWeight]
    plain: dict[str, Stored]
    unused: list[str] = field(default_factory=list)


def is_quantized(checkpoint: StoredCheckpoint, scheme: Scheme) -> bool:
    """Whether files or tensors say that weights are quantized."""
    return bool(scheme.method) or any(_is_mark(tensor) for tensor in checkpoint.tensors.values())


def _is_mark(tensor: Stored) -> bool:
    quantized = tensor.dtype in FP8 or ".quant_state." in tensor.name
    return quantized or (tensor.name.endswith(_MARKS) and ".embed_scale" not in tensor.name)


def read_weights(checkpoint: StoredCheckpoint, scheme: Scheme) -> Weights:
    """Give each tensor its meaning. ValueError names the first that cannot be read, before any weight is."""
    pool = Pool(checkpoint.tensors)
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
    encoded |= take_experts(pool)
    encoded |= take_modelopt(pool)
    encoded |= take_compressed(pool, scheme)
    encoded |= take_fp8(pool, scheme)
    if rest := [tensor for tensor in pool.left.values() if _is_mark(tensor)]:
        said = f"quant_method {method!r} of {scheme.file}" if method else "no file names a quantization, and"
        raise ValueError(
            f"{len(rest)} tensors of quantized weights cannot be read, such as {rest[0].name} ({rest[0].dtype} "
            f"{list(rest[0].shape)}): {said} does not say how their values are meant"
        )
    return Weights(method, encoded, pool.left, pool.unused)


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
            return f"{module}.g_idx" not in by_name and zeros.shape[1] == tensor.shape[1]
    return False
