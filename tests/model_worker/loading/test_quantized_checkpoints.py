"""Quantized checkpoints give the logits of the weights that they mean, in panels; others are refused by their fault."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model_worker.batch import ForwardBatch
from model_worker.cpu import kernel_cache
from model_worker.cpu.gemm.coded_linear import CodedLinear, WordLinear
from model_worker.cpu.gemm.encoded_linear import EncodedLinear
from model_worker.cpu.gemm.int8_linear import Int8Linear
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.simd.code_groups import HAS_BYTE_TABLES
from model_worker.loading.load import load_model
from model_worker.loading.quantized.awq import AwqWeight
from model_worker.loading.quantized.read import read_weights
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import open_stored
from model_worker.model import LoadedModel, ModelRefused
from model_worker.pooling.load import load_pooling
from model_worker.runner import ModelRunner
from tests.model_worker.loading.quantized_checkpoints import (
    FORMATS,
    alter_config,
    quantize_checkpoint,
    quantize_experts,
)
from tests.model_worker.tiny_models import tiny_model

# Projections that fill whole panels and groups.
SIZE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 1}
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.getbasetemp(), **SIZE)


def load(path: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    return load_model(path, dtype, "cpu", lambda phase, done, total: None, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def exact(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ModelRefused) as caught:
        load(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_meant(name: str, llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS[name])
    loaded = load(path)
    assert loaded.stack is not None
    reference = exact(path)
    for linear, meant in zip(loaded.model.modules(), reference.modules(), strict=False):
        assert not isinstance(linear, EncodedLinear)
        if isinstance(linear, PackedLinear):
            assert torch.equal(linear.weight, meant.weight)
    torch.testing.assert_close(logits(loaded.model), logits(reference), rtol=1e-4, atol=1e-4)


# Formats whose weights panels hold as they are, and their bits there.
KEPT = {
    "gptq": 4,
    "gptq v2": 4,
    "gptq in one order": 4,
    "gptq 8 bits": 8,
    "gptq 3 bits": 4,
    "auto-round": 4,
    "awq": 4,
    "w4a16": 4,
    "w4a16 with zeros": 4,
    "w3a16": 4,
    "w6a16": 6,
    "w8a16": 8,
    "w8a8": 8,
    "bitsandbytes int8": 8,
    "nvfp4": 6,
    "nvfp4 of ModelOpt": 6,
    "mxfp4 of compressed-tensors": 4 if HAS_BYTE_TABLES else 5,
    "mxfp6": 8,
    "fp8 of compressed-tensors": 8,
    "fp8 of tensors": 8,
    "fp8 of blocks": 8,
    "fp8 of ModelOpt": 8,
    "nf4": 4,
    "nf4, nested": 4,
}


# The stack of weights in codes is compiled.
@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_weights_stay_in_their_bits(name: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Panels have the very numbers, and the stack computes with them."""
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS[name])
    loaded = load(path, "bfloat16")
    assert loaded.stack is not None
    assert loaded.kernel_family == kernel_cache.CODED
    reference = exact(path)
    kept = {key: module for key, module in loaded.model.named_modules() if isinstance(module, CodedLinear)}
    assert len(kept) == 8
    for key, module in kept.items():
        if not isinstance(module, WordLinear):
            assert module.layout.bits == KEPT[name]
            # Bits of a weight, and at most three for the numbers of its group.
            assert module.num_bytes * 8 < (KEPT[name] + 3) * 1.1 * max(64, module.out_features) * module.in_features
        got = module.rows(torch.arange(module.out_features))
        wanted = reference.get_submodule(key).weight
        assert torch.equal(got, wanted if not isinstance(module, WordLinear) else wanted.bfloat16().float())
    batch = whole_batch()
    got = ModelRunner(loaded, 4, 16).backend.logits(batch)
    want = logits(reference)[0]
    # Codes of 8 bits mean large weights here, so that attention is sharp and what bfloat16 rounds shows.
    assert float((got - want).norm() / want.norm()) < (0.2 if KEPT[name] == 8 else 0.03)


def whole_batch() -> ForwardBatch:
    """TOKENS in one piece."""
    count = np.array([TOKENS.shape[1]])
    table = np.arange(-(-TOKENS.shape[1] // 16))[None]
    return ForwardBatch.build(TOKENS[0].numpy(), count, count, table, 16, np.arange(TOKENS.shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq in order of activations", "w4a16 in order of activations"])
def test_layers_in_different_orders_run_as_modules(
    name: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS[name])
    loaded = load(path, "bfloat16")
    assert "since linear layers of the same inputs have them in different orders" in caplog.text
    assert loaded.stack is None
    down = loaded.model.model.layers[0].mlp.down_proj
    assert isinstance(down, CodedLinear)
    assert torch.equal(down.rows(torch.arange(128)), exact(path).model.layers[0].mlp.down_proj.weight)
    got = ModelRunner(loaded, 4, 16).backend.logits(whole_batch()).float()
    want = logits(exact(path))[0]
    assert float((got - want).norm() / want.norm()) < 0.1


def test_codes_that_panels_cannot_hold_are_decoded(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["fp8 of five bits of exponent"])
    loaded = load(path, "bfloat16")
    assert loaded.kernel_family == kernel_cache.DECODER
    assert isinstance(loaded.model.model.layers[0].mlp.down_proj, PackedLinear)


# Version 1 of GPTQ and version 2 differ in what zeros mean, which only a file can say.
@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith(("gptq", "auto"))])
def test_a_format_that_no_file_names_is_known_by_its_tensors(name: str, llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS[name], said=False)
    weights = read_weights(open_stored(path), Scheme())
    meant = load_file(path / "exact" / "model.safetensors")
    assert len(weights.encoded) == 7
    for key, weight in weights.encoded.items():
        assert torch.equal(weight.decoded(torch.float32), meant[key])


@pytest.mark.parametrize("name", ["w8a8", "bitsandbytes int8"])
def test_int8_panels_hold_int8_numbers_as_they_are(name: str, llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS[name])
    loaded = load(path, quantization="int8")
    head = loaded.model.lm_head
    assert isinstance(head, Int8Linear)
    meant = dict(exact(path).named_modules())
    panels = [(key, module) for key, module in loaded.model.named_modules() if isinstance(module, Int8Linear)]
    assert len(panels) == 8
    for key, module in panels:
        if module is not head:
            assert torch.equal(module.weight, meant[key].weight)


def resident(path: Path) -> int:
    """Bytes of a file that memory pages of this process hold."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = line.endswith(str(path))
        elif counts and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16", "w8a8", "nf4"])
def test_pages_of_the_file_are_given_back(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    size = SIZE | {"hidden_size": 512, "intermediate_size": 1024}
    plain = tiny_model("llama", tmp_path_factory.getbasetemp(), **size)
    path = quantize_checkpoint(plain, tmp_path / "q", FORMATS[name])
    file = path / "model.safetensors"
    quantized = sum(t.nbytes for key, t in load_file(file).items() if "_proj." in key)
    seen: list[int] = []

    def packed(phase: str, done: int, total: int) -> None:
        if phase == "pack weights" and done == total:
            seen.append(resident(file))

    load_model(path, "float32", "cpu", packed)
    # Parts of pages stay at the edges of tensors, and those of the other tensors. A read maps pages around it anew, as
    # many as the order of tensors has it.
    assert seen[-1] < file.stat().st_size - 0.4 * quantized


def test_four_bits_may_go_to_int8_panels(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["awq"])
    loaded = load(path, quantization="int8")
    assert isinstance(loaded.model.model.layers[0].mlp.down_proj, Int8Linear)
    error = logits(loaded.model) - logits(exact(path))
    assert error.norm() < 0.05 * logits(exact(path)).norm()


def test_without_kernels_weights_are_plain(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["gptq"])
    loaded = load(path, has_kernels=lambda *_: False)
    assert type(loaded.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    torch.testing.assert_close(logits(loaded.model), logits(exact(path)), rtol=1e-4, atol=1e-4)
    assert "decoded to torch.float32 in memory, since kernels are still to be compiled" in caplog.text


def test_parameters_are_counted_as_those_of_the_plain_model(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["fp8 of five bits of exponent"])
    loaded = load(path, "bfloat16")
    plain = load(llama, "bfloat16")
    assert loaded.parameter_count == plain.parameter_count
    assert loaded.parameter_bytes == plain.parameter_bytes


@pytest.mark.parametrize("name", ["fp8 of blocks", "gptq"])
def test_experts_of_single_tensors_may_be_decoded(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = tiny_model("mixtral", tmp_path_factory.getbasetemp(), hidden_size=64, intermediate_size=96)
    path = quantize_checkpoint(plain, tmp_path / "q", FORMATS[name], ends=(".w1.weight", ".w2.weight", ".w3.weight"))
    torch.testing.assert_close(logits(load(path).model), logits(exact(path)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "fp8 of blocks"])
def test_experts_of_single_tensors_stay_in_their_bits(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As repositories on the hub have them: a tensor for each projection of each expert."""
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    plain = tiny_model("qwen3_moe", tmp_path_factory.getbasetemp(), **sizes)
    path = quantize_checkpoint(plain, tmp_path / "q", FORMATS[name])
    stored = load_file(path / "model.safetensors")
    assert any(".mlp.experts.3.up_proj." in key for key in stored)
    loaded = load(path, "bfloat16")
    reference = exact(path)
    kept, meant = (model.model.layers[0].mlp.experts for model in (loaded.model, reference))
    for number in range(4):
        gate, up = kept.gate_up_proj.experts[number]
        (down,) = kept.down_proj.experts[number]
        assert {linear.layout.bits for linear in (gate, up, down)} == {KEPT[name]}
        whole = torch.cat([linear.rows(torch.arange(64)) for linear in (gate, up)])
        assert torch.equal(whole, meant.gate_up_proj[number])
        assert torch.equal(down.rows(torch.arange(64)), meant.down_proj[number])
    assert loaded.parameter_count == sum(p.numel() for p in reference.parameters())
    exact_logits = load(path)
    torch.testing.assert_close(logits(exact_logits.model), logits(reference), rtol=1e-4, atol=1e-4)
    error = logits(loaded.model).float() - logits(reference)
    # A router may choose another expert, since it computes in bfloat16.
    assert error.norm() < 0.1 * logits(reference).norm()


def test_experts_of_gpt_oss(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = tiny_model("gpt_oss", tmp_path_factory.getbasetemp(), hidden_size=64, intermediate_size=64)
    path = quantize_experts(plain, tmp_path / "q")
    torch.testing.assert_close(logits(load(path).model), logits(exact(path)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_experts_of_gpt_oss_stay_in_four_bits(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = tiny_model("gpt_oss", tmp_path_factory.getbasetemp(), hidden_size=64, intermediate_size=64)
    path = quantize_experts(plain, tmp_path / "q")
    loaded = load(path, "bfloat16")
    reference = exact(path)
    for name in ("gate_up_proj", "down_proj"):
        kept = getattr(loaded.model.model.layers[0].mlp.experts, name)
        meant = getattr(reference.model.layers[0].mlp.experts, name)
        for number, (linear,) in enumerate(kept.experts):
            assert isinstance(linear, CodedLinear)
            assert linear.layout.bits == (4 if HAS_BYTE_TABLES else 5)
            assert torch.equal(linear.rows(torch.arange(linear.out_features)), meant[number].T)
    got = ModelRunner(loaded, 4, 16).backend.logits(whole_batch()).float()
    want = logits(reference)[0]
    # Its attention, too, computes in bfloat16 as modules do.
    assert float((got - want).norm() / want.norm()) < 0.1


def test_zeros_for_biases_that_the_model_lacks_are_left_out(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["gptq"])
    tensors = load_file(path / "model.safetensors")
    key = "model.layers.0.self_attn.o_proj.bias"
    save_file({**tensors, key: torch.zeros(128)}, path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(load(path).model), logits(exact(path)), rtol=1e-4, atol=1e-4)
    save_file({**tensors, key: torch.ones(128)}, path / "model.safetensors", metadata={"format": "pt"})
    assert f"{key} is not zero, and the model has no place for it" in refusal(path)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"quant_method": "aqlm"}, "quant_method 'aqlm', which cannot be read here"),
    ("gptq", {"quant_method": None}, "quant_method '', which cannot be read here"),
    ("gptq", {"bits": 5}, "config.json has bits 5"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ("auto-round", {"packing_format": "auto_round:fp8"}, "packing_format 'auto_round:fp8'"),
    ("awq", {"version": "gemv"}, "version 'gemv'"),
    ("awq", {"bits": 8}, "bits 8"),
    ("w4a16", {"format": "marlin-24"}, "format 'marlin-24' (format) of compressed-tensors"),
    ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config 'sparse-24-bitmask'"),
    ("w4a16", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ("w4a16", {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "num_bits [8]"),
    ("fp8 of blocks", {"weight_block_size": [64, 64]}, "fits neither the outputs nor blocks"),
    ("fp8 of ModelOpt", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
]


@pytest.mark.parametrize(("name", "changed", "reason"), REFUSED)
def test_schemes_that_cannot_be_read_are_named(
    name: str, changed: dict[str, Any], reason: str, llama: Path, tmp_path: Path
) -> None:
    form = FORMATS[name]
    path = quantize_checkpoint(llama, tmp_path / "q", form._replace(config={**form.config, **changed}))
    assert reason in refusal(path)


def test_modelopt_and_older_files_name_schemes(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["fp8 of tensors"], said=False)
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_MIXED"}}
    (path / "hf_quant_config.json").write_text(json.dumps(described))
    assert "hf_quant_config.json names quant_algo 'W4A16_MIXED'" in refusal(path)
    path = quantize_checkpoint(llama, tmp_path / "older", FORMATS["gptq"], said=False)
    assert "no file says the version of GPTQ" in refusal(path)
    (path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    torch.testing.assert_close(logits(load(path).model), logits(exact(path)), rtol=1e-4, atol=1e-4)


def test_fp8_without_its_scales_is_refused(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["fp8 of tensors"], said=False)
    tensors = load_file(path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.endswith("scale")}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    assert "is FP8 and has no scale beside it" in refusal(path)


# A format with codes, the part of a weight that is left out, and what is said then.
ALONE = [
    ("w8a8", "weight_scale", "7 weights are codes without scales, such as"),
    ("bitsandbytes int8", "SCB", "7 weights are codes without scales, such as"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", "7 weights are codes without scales, such as"),
    ("nf4, nested", "weight.nested_absmax", "no model.layers.0.mlp.down_proj.weight.nested_absmax says"),
    ("nvfp4", "weight_global_scale", "is NVFP4 and has no weight_global_scale beside it"),
    ("nvfp4 of ModelOpt", "weight_scale_2", "weight_scale is FP8 and has no scale beside it"),
]


@pytest.mark.parametrize(("name", "end", "reason"), ALONE)
@pytest.mark.parametrize("said", [True, False])
def test_codes_without_what_they_mean_are_refused(
    name: str, end: str, reason: str, said: bool, llama: Path, tmp_path: Path
) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS[name], said=said)
    tensors = load_file(path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.endswith(f"_proj.{end}")}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    assert reason in refusal(path)
    # One of several is enough.
    one = f"model.layers.0.mlp.down_proj.{end}"
    tensors.pop(one)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert reason.replace("7 ", "1 ") in refusal(path)


def test_scales_that_no_format_knows_are_refused(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["awq"], said=False)
    scales = {f"{key}_scale": torch.ones(1) for key in tensors if key.endswith("_proj.weight")}
    save_file({**tensors, **scales}, path / "model.safetensors", metadata={"format": "pt"})
    assert "7 tensors of quantized weights cannot be read" in refusal(path)


def test_scales_of_zero_are_refused(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["awq"])
    tensors = load_file(path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.scales"
    tensors[key] = torch.zeros_like(tensors[key])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert f"{key} is all zeros" in refusal(path)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"has_kernels": lambda *_: False}])
def test_a_weight_that_cannot_be_decoded_is_named(
    options: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["awq"])
    rows = AwqWeight.rows

    def broken(self: AwqWeight, first: int, last: int) -> torch.Tensor:
        if "up_proj" in self._codes.name:
            raise RuntimeError("sizes of tensors must match")
        return rows(self, first, last)

    monkeypatch.setattr(AwqWeight, "rows", broken)
    assert "the weight of model.layers.0.mlp.up_proj cannot be read" in refusal(path, **options)


def test_groups_beyond_the_scales_are_refused(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["gptq"])
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.g_idx"][5] = 9
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "up_proj.g_idx names group 9" in refusal(path)


def test_inputs_in_an_order_that_no_tensor_says_are_refused(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["gptq in one order"])
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.g_idx"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "up_proj.qweight has no g_idx beside it, and config.json has desc_act" in refusal(path)


def test_a_config_that_says_nothing_of_the_scheme_changes_nothing(llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["w8a8"], said=False)
    alter_config(path, quantization_config=None)
    torch.testing.assert_close(logits(load(path).model), logits(exact(path)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("said", [True, False])
def test_pooling_refuses_quantized_weights(said: bool, llama: Path, tmp_path: Path) -> None:
    path = quantize_checkpoint(llama, tmp_path / "q", FORMATS["fp8 of tensors"], said=said)
    with pytest.raises(ModelRefused, match="task embed: its weights are quantized"):
        load_pooling(path, task="embed")
