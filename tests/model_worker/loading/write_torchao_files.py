"""Writes the files of torchao_files: a matrix as torchao 0.18 has it in each way, and in float32 what torchao decodes.

Run with torchao beside the torch of this project: python -m tests.model_worker.loading.write_torchao_files
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

FOLDER = Path(__file__).parent / "torchao_files"
OUTPUTS = 16
INPUTS = 64


def ways(torchao: Any) -> dict[str, Any]:
    """torchao's ways to quantize on a CPU, by the names of the files."""
    groups = torchao.PerGroup(32)
    # torch's stubs do not have it.
    int4: torch.dtype = vars(torch)["int4"]
    return {
        "int8_of_outputs": torchao.Int8WeightOnlyConfig(version=2),
        "int8_of_groups": torchao.Int8WeightOnlyConfig(version=2, granularity=groups),
        "int8_of_the_tensor": torchao.Int8WeightOnlyConfig(version=2, granularity=torchao.PerTensor()),
        "int8_and_its_inputs": torchao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4_of_groups": torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=groups),
        "int4_with_zeros": torchao.IntxWeightOnlyConfig(
            weight_dtype=int4, granularity=groups, mapping_type=torchao.MappingType.ASYMMETRIC
        ),
        "float8": torchao.Float8WeightOnlyConfig(),
    }


def main() -> None:
    torchao: Any = import_module("torchao.quantization")
    files: Any = import_module("torchao.prototype.safetensors.safetensors_support")
    torch.manual_seed(0)
    for name, way in ways(torchao).items():
        model = nn.Sequential()
        model.add_module("up_proj", nn.Linear(INPUTS, OUTPUTS, bias=False))
        torchao.quantize_(model, way)
        tensors, metadata = files.flatten_tensor_state_dict(model.state_dict())
        decoded: Any = model.get_submodule("up_proj").weight
        tensors["decoded"] = decoded.dequantize().detach().float()
        whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
        FOLDER.mkdir(exist_ok=True)
        save_file(whole, FOLDER / f"{name}.safetensors", metadata={**metadata, "format": "pt"})


if __name__ == "__main__":
    main()
