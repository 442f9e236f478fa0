"""Checkpoints that the formats' own libraries wrote give the logits of what these libraries decode.

compressed-tensors comes with the extra test. Files of torchao lie here (write_torchao_files.py), since transformers,
peft and diffusers import it wherever it is there. GPTQModel needs a newer torch than is served with.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from model_worker.cpu.gemm.coded_linear import CodedLinear, WordLinear
from model_worker.loading.load import load_model
from model_worker.loading.quantized.read import Weights, read_weights
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import open_stored
from tests.model_worker.loading.test_quantized_checkpoints import SIZE, logits
from tests.model_worker.loading.write_torchao_files import FOLDER, INPUTS, OUTPUTS
from tests.model_worker.tiny_models import tiny_model


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.getbasetemp(), **SIZE)


def loaded(path: Path, dtype: str) -> Any:
    return load_model(path, dtype, "cpu", lambda *_: None).model


def relative(got: Tensor, want: Tensor) -> float:
    with torch.no_grad():
        return float((got - want).norm() / want.norm())


def meant(plain: Path, weights: dict[str, Tensor]) -> Any:
    """The plain model with some weights in the place of its own."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert len(missing) < len(model.state_dict())
    return model.eval()


# Arguments of quantized weights, how exactly the library decodes them, and the bits that panels hold them in.
_GROUPS = {"strategy": "group", "group_size": 32}
_MX = {"type": "float", **_GROUPS, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
_NVFP4 = {"type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
COMPRESSED: dict[str, tuple[dict[str, Any], float, int]] = {
    "w4a16": ({"num_bits": 4, **_GROUPS}, 1e-6, 4),
    "w4a16 with zeros": ({"num_bits": 4, "symmetric": False, **_GROUPS}, 1e-6, 4),
    "w4a16 of outputs with zeros": ({"num_bits": 4, "symmetric": False, "strategy": "channel"}, 1e-6, 4),
    "w4a16 of the tensor with zeros": ({"num_bits": 4, "symmetric": False, "strategy": "tensor"}, 1e-6, 4),
    "w3a16": ({"num_bits": 3, "symmetric": False, **_GROUPS}, 1e-6, 4),
    "w5a16": ({"num_bits": 5, "strategy": "channel"}, 1e-6, 5),
    "w6a16": ({"num_bits": 6, **_GROUPS}, 1e-6, 6),
    "w7a16": ({"num_bits": 7, "symmetric": False, **_GROUPS}, 1e-6, 8),
    "w8a8 of the tensor": ({"num_bits": 8, "symmetric": False, "strategy": "tensor"}, 1e-6, 8),
    "w8a8": ({"num_bits": 8, "strategy": "channel"}, 1e-6, 8),
    "fp8 of the tensor": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, 1e-6, 8),
    "fp8 of outputs": ({"num_bits": 8, "type": "float", "strategy": "channel"}, 1e-6, 8),
    "fp8 of blocks": ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}, 1e-6, 8),
    # The library decodes it in bfloat16.
    "nvfp4": ({"num_bits": 4, **_NVFP4}, 2**-7, 6),
    "mxfp4": ({"num_bits": 4, **_MX}, 1e-6, 0),
    "mxfp6": ({"num_bits": 6, **_MX}, 1e-6, 8),
    "mxfp8": ({"num_bits": 8, **_MX}, 1e-6, 8),
}


def compressed_with(plain: Path, path: Path, arguments: dict[str, Any]) -> Any:
    """Have compressed-tensors quantize the decoder's layers and the table, and return what it decodes of them."""
    # The extra test has the library: without it these tests fail.
    compressors: Any = import_module("compressed_tensors.compressors")
    quantization: Any = import_module("compressed_tensors.quantization")
    # Blocks are whole here, which those of the table would not be.
    targets = ["Linear"] if arguments["strategy"] == "block" else ["Linear", "Embedding"]
    rounded = {"input_activations": _dynamic(quantization, arguments)} if arguments["num_bits"] == 8 else {}
    weights = quantization.QuantizationArgs(**arguments)
    scheme = quantization.QuantizationScheme(targets=targets, weights=weights, **rounded)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    quantized = [name for name, one in model.named_modules() if hasattr(one, "quantization_scheme")]
    for name in quantized:
        _fit(model.get_submodule(name), quantization)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(str(path))
    compressor.decompress_model(model)
    weights = {f"{name}.weight": model.get_parameter(f"{name}.weight").float() for name in quantized}
    return meant(plain, weights)


def _dynamic(quantization: Any, arguments: dict[str, Any]) -> Any:
    """Inputs that are rounded while the model runs, as those of w8a8 and FP8 are."""
    kind = arguments.get("type", "int")
    return quantization.QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True)


def _fit(module: Any, quantization: Any) -> None:
    """Give a layer the scales and zeros of its least and largest weights, as the library's calibration does."""
    arguments = module.quantization_scheme.weights
    weight = module.weight.detach()
    if arguments.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif arguments.strategy == "channel":
        parts = weight[:, None]
    elif arguments.strategy == "block":
        height, width = arguments.block_structure
        parts = weight.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).flatten(2)
    else:
        parts = weight.unflatten(-1, (-1, arguments.group_size))
    whole = None
    if arguments.strategy == "tensor_group":
        whole = quantization.utils.generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data = whole
    scales, zeros = quantization.utils.calculate_qparams(parts.amin(-1), parts.amax(-1), arguments, whole)
    module.weight_scale.data = scales.to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zeros.to(module.weight_zero_point.dtype)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name: str, llama: Path, tmp_path: Path) -> None:
    arguments, exactness, _ = COMPRESSED[name]
    reference = compressed_with(llama, tmp_path, arguments)
    got = loaded(tmp_path, "float32")
    for key, module in reference.named_modules():
        if isinstance(module, nn.Linear):
            assert relative(got.get_submodule(key).weight, module.weight) <= exactness
    assert relative(logits(got), logits(reference)) < 1e-4 + 2 * exactness


# The stack of weights in codes is compiled.
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSED)
def test_weights_of_compressed_tensors_stay_in_their_bits(
    name: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    arguments, exactness, bits = COMPRESSED[name]
    reference = compressed_with(llama, tmp_path, arguments)
    got = loaded(tmp_path, "bfloat16")
    kept = {key: one for key, one in got.named_modules() if isinstance(one, CodedLinear)}
    assert len(kept) == 8
    for key, one in kept.items():
        if not isinstance(one, WordLinear):
            assert bits in (0, one.layout.bits)
            weight = reference.get_submodule(key).weight
            assert relative(one.rows(torch.arange(one.out_features)), weight) <= exactness
    assert "are decoded to" not in caplog.text


def torchao_file(name: str, path: Path, without: str = "") -> Weights:
    """Read a file that torchao wrote, without one of its tensors."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys() if key != without}  # noqa: SIM118
        metadata = file.metadata()
    save_file(tensors, path / "model.safetensors", metadata=metadata)
    return read_weights(open_stored(path), Scheme("torchao"))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.safetensors")), ids=lambda file: file.stem)
def test_torchao(file: Path, tmp_path: Path) -> None:
    found = torchao_file(file.stem, tmp_path)
    weight = found.encoded["up_proj.weight"]
    want = found.plain["decoded"].read()
    torch.testing.assert_close(weight.decoded(torch.float32), want, rtol=1e-6, atol=0)
    assert weight.codes is not None
    kept = CodedLinear((OUTPUTS, INPUTS), None, torch.bfloat16, weight.codes)
    assert relative(kept.rows(torch.arange(OUTPUTS)), want) < 1e-6


def test_the_files_of_torchao_have_zeros() -> None:
    assert len(list(FOLDER.glob("*.safetensors"))) == 7
    with safe_open(FOLDER / "int4_with_zeros.safetensors", framework="pt") as file:
        assert bool(file.get_tensor("up_proj._weight_zero_point").any())


@pytest.mark.parametrize("part", ["qdata", "scale", "zero_point"])
def test_torchao_without_a_part_is_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"up_proj\.weight is torchao's IntxUnpackedToInt8Tensor and has no"):
        torchao_file("int4_with_zeros", tmp_path, f"up_proj._weight_{part}")
