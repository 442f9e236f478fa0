"""Writes tiny checkpoints in quantized formats by their published layouts, with the float32 weights that they mean.

Codes and scales are drawn, not fitted to weights: what a format says must be read, whatever it says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
NF4 = torch.tensor([-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Written(NamedTuple):
    """The tensors of one quantized weight, by the ends of their names, and the float32 weight that they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


class Format(NamedTuple):
    """A format: what writes a weight [out, in] of this size, and the quantization_config."""

    write: Callable[[torch.Generator, int, int], Written]
    config: dict[str, Any]


def _codes(draw: torch.Generator, bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 1 << bits, shape, generator=draw)


def _scales(draw: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return ((0.5 + torch.rand(shape, generator=draw)) * 0.02).to(dtype)


def _words(values: Tensor, bits: int) -> Tensor:
    """Pack along the last dimension into int32, the lowest bits first and without gaps."""
    stream = (values[..., None].long() >> torch.arange(bits) & 1).flatten(-2)
    words = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    packed = (words << torch.arange(32)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _gptq(
    bits: int, stored_less: int, ordered: bool = False, alike: bool = False
) -> Callable[[torch.Generator, int, int], Written]:
    """With `alike`, the weights of as many inputs have them in one order, as those have that read the same inputs."""

    def write(draw: torch.Generator, outputs: int, inputs: int) -> Written:
        codes = _codes(draw, bits, inputs, outputs)
        zeros = torch.randint(1, 1 << bits, (inputs // GROUP, outputs), generator=draw)
        scales = _scales(draw, inputs // GROUP, outputs)
        groups = torch.arange(inputs) // GROUP
        if ordered:
            shuffle = torch.Generator().manual_seed(inputs) if alike else draw
            groups = groups[torch.randperm(inputs, generator=shuffle)]
        weight = scales.float()[groups] * (codes - zeros[groups])
        tensors = {
            "qweight": _words(codes.t(), bits).t(),
            "qzeros": _words(zeros - stored_less, bits),
            "scales": scales,
            "g_idx": groups.int(),
        }
        return Written(tensors, weight.t())

    return write


def _awq(draw: torch.Generator, outputs: int, inputs: int) -> Written:
    codes = _codes(draw, 4, inputs, outputs)
    zeros = _codes(draw, 4, inputs // GROUP, outputs)
    scales = _scales(draw, inputs // GROUP, outputs)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: Tensor) -> Tensor:
        return _words(values.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    groups = torch.arange(inputs) // GROUP
    weight = scales.float()[groups] * (codes - zeros[groups])
    return Written({"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, weight.t())


def _packed(bits: int, zero_points: bool, ordered: bool = False) -> Callable[[torch.Generator, int, int], Written]:
    def write(draw: torch.Generator, outputs: int, inputs: int) -> Written:
        codes = _codes(draw, bits, outputs, inputs)
        scales = _scales(draw, outputs, inputs // GROUP, dtype=torch.bfloat16)
        zeros = torch.full((outputs, inputs // GROUP), 1 << (bits - 1))
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if zero_points:
            zeros = _codes(draw, bits, outputs, inputs // GROUP)
            tensors["weight_zero_point"] = _words(zeros.t(), bits).t()
        groups = torch.arange(inputs) // GROUP
        if ordered:
            groups = groups[torch.randperm(inputs, generator=draw)]
            tensors["weight_g_idx"] = groups.int()
        return Written(tensors, scales.float()[:, groups] * (codes - zeros[:, groups]))

    return write


def _int8(draw: torch.Generator, outputs: int, inputs: int) -> Written:
    numbers = torch.randint(-127, 128, (outputs, inputs), generator=draw).to(torch.int8)
    scales = _scales(draw, outputs, 1, dtype=torch.float32) / 8
    return Written({"weight": numbers, "weight_scale": scales}, numbers * scales)


def _fp8(
    kind: str, dtype: torch.dtype = torch.float8_e4m3fn, side: int = 32
) -> Callable[[torch.Generator, int, int], Written]:
    """Scales are those of the tensor, of outputs (channel), or of blocks of this side."""

    def write(draw: torch.Generator, outputs: int, inputs: int) -> Written:
        numbers = (torch.randn(outputs, inputs, generator=draw) * 60).to(dtype)
        if kind == "tensor":
            scales = _scales(draw, dtype=torch.float32) / 16
            tensors = {"weight_scale": scales, "input_scale": torch.tensor(0.01)}
            return Written({"weight": numbers, **tensors}, numbers.float() * scales)
        if kind == "channel":
            scales = _scales(draw, outputs, 1, dtype=torch.bfloat16) / 16
            return Written({"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float())
        scales = _scales(draw, -(-outputs // side), -(-inputs // side), dtype=torch.float32) / 16
        along = scales.repeat_interleave(side, 0)[:outputs].repeat_interleave(side, 1)[:, :inputs]
        return Written({"weight": numbers, "weight_scale_inv": scales}, numbers.float() * along)

    return write


def _e2m1(codes: Tensor) -> Tensor:
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def _nvfp4(style: str) -> Callable[[torch.Generator, int, int], Written]:
    def write(draw: torch.Generator, outputs: int, inputs: int) -> Written:
        codes = _codes(draw, 4, outputs, inputs)
        data = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        scales = (0.5 + torch.rand(outputs, inputs // 16, generator=draw)).to(torch.float8_e4m3fn)
        weight = _e2m1(codes) * scales.float().repeat_interleave(16, 1) / 64
        if style == "modelopt":
            return Written({"weight": data, "weight_scale": scales, "weight_scale_2": torch.tensor(1 / 64)}, weight)
        return Written(
            {"weight_packed": data, "weight_scale": scales, "weight_global_scale": torch.tensor([64.0])}, weight
        )

    return write


def _mxfp4(draw: torch.Generator, outputs: int, inputs: int) -> Written:
    codes = _codes(draw, 4, outputs, inputs)
    data = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    exponents = torch.randint(119, 123, (outputs, inputs // 32), generator=draw)
    weight = _e2m1(codes) * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return Written({"weight_packed": data, "weight_scale": exponents.to(torch.uint8)}, weight)


def _mxfp6(draw: torch.Generator, outputs: int, inputs: int) -> Written:
    codes = _codes(draw, 6, outputs, inputs)
    exponents = torch.randint(117, 121, (outputs, inputs // 32), generator=draw)
    size, fraction = (codes >> 3 & 3).float(), (codes & 7) / 8
    values = torch.where(size > 0, (1 + fraction) * torch.exp2(size - 1), fraction) * (1 - 2 * (codes >> 5))
    weight = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    data = _words(codes, 6).contiguous().view(torch.uint8)
    return Written({"weight_packed": data, "weight_scale": exponents.to(torch.uint8)}, weight)


def _nf4(nested: bool) -> Callable[[torch.Generator, int, int], Written]:
    def write(draw: torch.Generator, outputs: int, inputs: int) -> Written:
        codes = _codes(draw, 4, outputs * inputs)
        blocks = -(-len(codes) // 64)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
        tensors = {
            "weight": ((codes[0::2] << 4) | codes[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": NF4.clone(),
        }
        if nested:
            stored = torch.randint(0, 256, (blocks,), generator=draw)
            table = torch.linspace(-1, 1, 256)
            scales = 0.05 * (0.5 + torch.rand(-(-blocks // 256), generator=draw))
            greatest = table[stored] * scales[torch.arange(blocks) // 256] + 0.1
            state |= {"nested_blocksize": 256, "nested_offset": 0.1, "nested_dtype": "float32"}
            tensors["weight.absmax"] = stored.to(torch.uint8)
            tensors["weight.nested_absmax"] = scales
            tensors["weight.nested_quant_map"] = table
        else:
            greatest = 0.1 * (0.5 + torch.rand(blocks, generator=draw))
            tensors["weight.absmax"] = greatest
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        values = NF4[codes] * greatest[torch.arange(len(codes)) // 64]
        return Written(tensors, values.view(outputs, inputs))

    return write


def _scb(draw: torch.Generator, outputs: int, inputs: int) -> Written:
    numbers = torch.randint(-127, 128, (outputs, inputs), generator=draw).to(torch.int8)
    greatest = 0.3 * (0.5 + torch.rand(outputs, generator=draw))
    tensors = {"weight": numbers, "SCB": greatest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Written(tensors, numbers * (greatest[:, None] / 127))


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", **weights}}},
        "ignore": ["lm_head"],
    }


_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
_FP8 = {"quant_method": "fp8"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

FORMATS: dict[str, Format] = {
    "gptq": Format(_gptq(4, 1), {**_GPTQ, "checkpoint_format": "gptq"}),
    "gptq v2": Format(_gptq(4, 0), {**_GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq in order of activations": Format(_gptq(4, 1, ordered=True), {**_GPTQ, "desc_act": True}),
    "gptq in one order": Format(_gptq(4, 1, ordered=True, alike=True), {**_GPTQ, "desc_act": True}),
    "gptq 8 bits": Format(_gptq(8, 1), {**_GPTQ, "bits": 8}),
    "gptq 3 bits": Format(_gptq(3, 1), {**_GPTQ, "bits": 3}),
    "auto-round": Format(
        _gptq(4, 1), {**_GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    ),
    "awq": Format(_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "w4a16": Format(_packed(4, False), _compressed("pack-quantized", num_bits=4)),
    "w4a16 with zeros": Format(_packed(4, True), _compressed("pack-quantized", num_bits=4)),
    "w4a16 in order of activations": Format(_packed(4, True, ordered=True), _compressed("pack-quantized", num_bits=4)),
    "w3a16": Format(_packed(3, True), _compressed("pack-quantized", num_bits=3)),
    "w6a16": Format(_packed(6, False), _compressed("pack-quantized", num_bits=6)),
    "w8a16": Format(_packed(8, False), _compressed("pack-quantized", num_bits=8)),
    "w8a8": Format(_int8, _compressed("int-quantized", num_bits=8)),
    "fp8 of compressed-tensors": Format(_fp8("channel"), _compressed("float-quantized", num_bits=8, type="float")),
    "fp8 of tensors": Format(_fp8("tensor"), _FP8),
    "fp8 of five bits of exponent": Format(_fp8("tensor", torch.float8_e5m2), _FP8),
    "fp8 of blocks": Format(_fp8("block"), {**_FP8, "weight_block_size": [32, 32]}),
    "fp8 of ModelOpt": Format(_fp8("tensor"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4 of ModelOpt": Format(_nvfp4("modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4": Format(_nvfp4("compressed"), _compressed("nvfp4-pack-quantized", num_bits=4, type="float")),
    "mxfp4 of compressed-tensors": Format(
        _mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)
    ),
    "mxfp6": Format(_mxfp6, _compressed("mxfp6-pack-quantized", num_bits=6, type="float", group_size=32)),
    "nf4": Format(_nf4(nested=False), _BNB),
    "nf4, nested": Format(_nf4(nested=True), _BNB),
    "bitsandbytes int8": Format(_scb, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
# As DeepSeek and Qwen have them; a CPU reads them as it does smaller ones.
BLOCKS_OF_128 = Format(_fp8("block", side=128), {**_FP8, "weight_block_size": [128, 128]})


def quantize_checkpoint(
    plain: Path,
    path: Path,
    form: Format,
    said: bool = True,
    seed: int = 0,
    ends: tuple[str, ...] = ("_proj.weight",),
    ignored: str = "",
) -> Path:
    """Write a checkpoint's matrices with these `ends` in a format, and beside it, in `exact`, a plain one with the
    weights meant. Those whose names have what is `ignored` stay plain.

    Without `said` no file names the format.
    """
    draw = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(ends) or (ignored and ignored in name):
            stored[name] = meant[name] = tensor
            continue
        tensors, weight = form.write(draw, *tensor.shape)
        module = name.removesuffix("weight")
        stored |= {module + end: value.contiguous() for end, value in tensors.items()}
        meant[name] = weight.float().contiguous()
    _save(plain, path, stored, meant)
    if said:
        alter_config(path, quantization_config=form.config)
    return path


def quantize_experts(plain: Path, path: Path) -> Path:
    """Write the experts of a gpt-oss model in MXFP4, and the plain model meant in `exact`."""
    draw = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        codes = _codes(draw, 4, experts, outputs, inputs // 32, 32)
        exponents = torch.randint(120, 124, (experts, outputs, inputs // 32), generator=draw)
        stored[f"{name}_blocks"] = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
        stored[f"{name}_scales"] = exponents.to(torch.uint8)
        weight = _e2m1(codes) * torch.exp2(exponents.float() - 127)[..., None]
        meant[name] = weight.flatten(-2).transpose(1, 2).contiguous()
    _save(plain, path, stored, meant)
    alter_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return path


def _save(plain: Path, path: Path, stored: dict[str, Tensor], meant: dict[str, Tensor]) -> None:
    for folder, tensors in ((path, stored), (path / "exact", meant)):
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "generation_config.json"):
            shutil.copy(plain / file, folder / file)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def alter_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))
