"""Models of GGUF files give the logits of transformers with the weights that their blocks stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from model_worker.cpu.gemm.coded_linear import CodedLinear
from model_worker.cpu.gemm.embedding import CodedEmbedding
from model_worker.cpu.gemm.int8_linear import Int8Linear
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cuda.encoded_experts import GroupedExperts
from model_worker.loading.gguf import load as gguf_load
from model_worker.loading.gguf.load import gguf_config
from model_worker.loading.gpu_weights import kept_on_gpu
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from shared.gguf.file import open_gguf
from shared.gguf.format import TYPES, GgufError
from tests.gguf_models import random_model, write_model
from tests.model_worker.cpu.test_fused_stack import batches, relative, truth
from tests.model_worker.cpu.test_fused_stack import logits as stack_logits
from tests.model_worker.cuda.interpreter import need_triton

VOCAB = 270
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
TOKENS = torch.arange(3, 60)[None]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
# Kinds of models in transformers, the architecture in the file, config values, and metadata beside the usual.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}, {}),
    "mixtral": (
        "llama",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2_moe": (
        "qwen2moe",
        {**EXPERTS, "shared_expert_intermediate_size": 48},
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3_moe": (
        "qwen3moe",
        {**EXPERTS, "head_dim": 32, "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma": ("gemma", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}, {}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 7.0,
        },
        {"attention.sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 7.0},
    ),
    "gemma3_text": (
        "gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 7,
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"attention.sliding_window": 7, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "gpt_oss": (
        "gpt-oss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 15e4,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 9,
            "rope.freq_base": 15e4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 12}, {"attention.sliding_window": 12, "rope.dimension_count": 16}),
}


def written(path: Path, family: str, kind: str, **size: Any) -> PreTrainedModel:
    architecture, values, metadata = FAMILIES[family]
    model = random_model(family, {**SIZE, **values, **size})
    return write_model(path, model, architecture, kind, **metadata)


def load(path: Path, dtype: str = "float32", kernels: bool = False, **options: Any) -> LoadedModel:
    return load_model(str(path), dtype, "cpu", lambda *_: None, has_kernels=lambda *_: kernels, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_decoded_weights(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reference = written(path, family, "Q8_0")
    loaded = load(path)
    assert type(loaded.model) is type(reference)
    assert loaded.eos_token_ids == (2, 0)
    torch.testing.assert_close(logits(loaded.model), logits(reference), rtol=1e-4, atol=1e-4)
    state = reference.state_dict()
    for name, weight in loaded.model.state_dict().items():
        if ".experts." not in name:
            assert torch.allclose(weight, state[name], atol=1e-6)


def test_a_llama_with_biases_of_queries_keys_and_values_alone(tmp_path: Path) -> None:
    """Files of llama.cpp may have any of the biases."""
    path = tmp_path / "model.gguf"
    reference = write_model(path, random_model("qwen2", SIZE), "llama", "Q8_0")
    loaded = load(path)
    assert loaded.architecture == "Qwen2ForCausalLM"
    assert loaded.model.model.layers[0].self_attn.q_proj.bias is not None
    torch.testing.assert_close(logits(loaded.model), logits(reference), rtol=1e-4, atol=1e-4)


# The last ones are decoded by the format's own package.
@pytest.mark.parametrize("kind", [*(kind.name for kind in TYPES.values()), "IQ2_XS", "IQ3_S", "TQ1_0"])
def test_every_type_of_blocks(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reference = written(path, "llama", kind, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    loaded = load(path)
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, reference.state_dict()[name]), name


def test_panels_are_made_of_blocks(tmp_path: Path) -> None:
    """A tied head is made of the embedding's blocks."""
    path = tmp_path / "model.gguf"
    reference = written(path, "qwen2", "Q5_0", num_key_value_heads=4)
    loaded = load(path, kernels=True)
    assert loaded.stack is not None
    meant = dict(reference.named_modules())
    packed = {name: module for name, module in loaded.model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == 15
    for name, module in packed.items():
        assert torch.equal(module.weight, meant[name].weight)
    torch.testing.assert_close(logits(loaded.model), logits(reference), rtol=1e-3, atol=1e-3)
    assert loaded.parameter_count == sum(p.numel() for p in reference.parameters())


# The stack of weights in codes is compiled.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_matrices_keep_their_codes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    reference = written(path, "llama", kind, hidden_size=256, intermediate_size=256, head_dim=64)
    loaded = load(path, "bfloat16", kernels=True)
    assert loaded.stack is not None
    assert loaded.row_invariant
    meant = dict(reference.named_modules())
    coded = {name: module for name, module in loaded.model.named_modules() if isinstance(module, CodedLinear)}
    assert len(coded) == 15
    for name, module in coded.items():
        weight = meant[name].weight
        torch.testing.assert_close(module.rows(torch.arange(len(weight))), weight, rtol=1e-6, atol=1e-7)
    error = logits(loaded.model).float() - logits(reference)
    assert error.norm() < 0.05 * logits(reference).norm()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_keeps_its_codes(tmp_path: Path, tied: bool) -> None:
    """Rows are decoded as they are looked up; a tied head and the table are the same panels."""
    path = tmp_path / "model.gguf"
    reference = written(path, "qwen2", "Q5_0", tie_word_embeddings=tied, hidden_size=256, num_attention_heads=4)
    loaded = load(path, "bfloat16", kernels=True)
    embedding = loaded.embedding
    assert loaded.stack is not None
    assert loaded.row_invariant
    assert isinstance(embedding, CodedEmbedding)
    assert (embedding.linear is loaded.model.lm_head) == tied
    meant = reference.get_input_embeddings().weight
    torch.testing.assert_close(embedding.weight, meant, rtol=1e-6, atol=1e-7)
    assert loaded.parameter_count == sum(p.numel() for p in reference.parameters())
    # No parameter is left but norms and biases.
    assert max(p.numel() for p in loaded.model.parameters()) <= 256
    error = logits(loaded.model).float() - logits(reference)
    assert error.norm() < 0.05 * logits(reference).norm()
    steps = batches(np.random.default_rng(), 16, 32)
    assert relative(stack_logits(ModelRunner(loaded, 32, 16), steps), truth(reference, steps)) < 0.02


def test_a_table_may_be_scaled_and_decoded_by_rows(tmp_path: Path) -> None:
    """Gemma 3 multiplies embeddings. Its table is in codes without a fused stack."""
    path = tmp_path / "model.gguf"
    reference = written(path, "gemma3_text", "Q8_0")
    loaded = load(path, "bfloat16", kernels=True)
    assert isinstance(loaded.embedding, CodedEmbedding)
    torch.testing.assert_close(
        loaded.embedding(TOKENS).float(), reference.get_input_embeddings()(TOKENS), rtol=0.01, atol=0.01
    )
    error = logits(loaded.model).float() - logits(reference)
    assert error.norm() < 0.05 * logits(reference).norm()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_keep_their_codes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reference = written(path, "qwen3_moe", "Q4_0", hidden_size=256)
    loaded = load(path, "bfloat16", kernels=True)
    experts = loaded.model.model.layers[1].mlp.experts
    meant = reference.model.layers[1].mlp.experts
    for number in range(4):
        gate, up = experts.gate_up_proj.experts[number]
        (down,) = experts.down_proj.experts[number]
        assert {type(linear) for linear in (gate, up, down)} == {CodedLinear}
        whole = torch.cat([linear.rows(torch.arange(32)) for linear in (gate, up)])
        assert torch.equal(whole, meant.gate_up_proj[number])
        assert torch.equal(down.rows(torch.arange(256)), meant.down_proj[number])
    assert loaded.parameter_count == sum(p.numel() for p in reference.parameters())
    error = logits(loaded.model).float() - logits(reference)
    # A router may choose another expert, since it computes in bfloat16.
    assert error.norm() < 0.1 * logits(reference).norm()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_whose_outputs_take_turns_keep_their_codes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reference = written(path, "gpt_oss", "MXFP4", num_hidden_layers=1)
    loaded = load(path, "bfloat16", kernels=True)
    experts = loaded.model.model.layers[0].mlp.experts
    meant = reference.model.layers[0].mlp.experts
    for number in range(4):
        gate, up = experts.gate_up_proj.experts[number]
        (down,) = experts.down_proj.experts[number]
        assert {type(linear) for linear in (gate, up, down)} == {CodedLinear}
        whole = torch.stack([linear.rows(torch.arange(96)) for linear in (gate, up)], 1).flatten(0, 1)
        assert torch.equal(whole, meant.gate_up_proj[number].T)
        assert torch.equal(down.rows(torch.arange(64)), meant.down_proj[number].T)
    error = logits(loaded.model).float() - logits(reference)
    # A router may choose another expert, since it computes in bfloat16.
    assert error.norm() < 0.1 * logits(reference).norm()


def test_experts_whose_outputs_take_turns_keep_their_codes_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_triton()
    from tests.model_worker.cuda.on_gpu import shorten_trials

    shorten_trials(monkeypatch)
    path = tmp_path / "model.gguf"
    reference = written(path, "gpt_oss", "MXFP4", num_hidden_layers=1)

    def kept(given: Any, skeleton: Any, _: torch.device, *rest: Any, **named: Any) -> Any:
        return kept_on_gpu(given, skeleton, torch.device("cpu"), *rest, **named)

    monkeypatch.setattr(gguf_load, "kept_on_gpu", kept)
    file = open_gguf(path)
    found: Any = gguf_load.load_gguf(file, gguf_config(file), "GptOss", torch.float32, torch.device("cuda"))
    experts, meant = (model.model.layers[0].mlp.experts for model in (found, reference))
    for name in ("gate_up_proj", "down_proj"):
        kept_experts = getattr(experts, name)
        assert isinstance(kept_experts, GroupedExperts)
        assert all(torch.equal(kept_experts[number], getattr(meant, name)[number]) for number in range(4))
    torch.testing.assert_close(logits(found.eval()), logits(reference), rtol=1e-4, atol=1e-4)


def test_a_model_in_codes_waits_for_kernels_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "llama", "Q4_0")
    asked = []

    def has_kernels(dtype: torch.dtype, family: str) -> bool:
        asked.append((dtype, family))
        return False

    loaded = load_model(str(path), "bfloat16", "cpu", lambda *_: None, has_kernels=has_kernels)
    assert asked == [(torch.bfloat16, "coded")]
    assert loaded.kernel_family == "coded"
    assert not loaded.has_kernels


def test_panels_may_be_int8(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reference = written(path, "llama", "Q8_0", num_key_value_heads=4)
    loaded = load(path, kernels=True, quantization="int8")
    assert isinstance(loaded.model.lm_head, Int8Linear)
    error = logits(loaded.model) - logits(reference)
    assert error.norm() < 0.05 * logits(reference).norm()


@pytest.mark.parametrize(
    ("parameters", "metadata"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
        ),
        ({"rope_type": "linear", "factor": 2.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    ],
)
def test_scaled_rotation(parameters: dict[str, Any], metadata: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = random_model("qwen2", {**SIZE, "rope_parameters": {"rope_theta": 1e4, **parameters}})
    write_model(path, model, "qwen2", **metadata)
    torch.testing.assert_close(logits(load(path).model), logits(model), rtol=1e-4, atol=1e-4)


def test_factors_of_llama_3(tmp_path: Path) -> None:
    """The file has only the factors that these parameters make of the frequencies."""
    path = tmp_path / "model.gguf"
    values: dict[str, Any] = {"rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = {**values, "rope_type": "llama3", "original_max_position_embeddings": 32}
    model = random_model("llama", {**SIZE, "rope_parameters": values})
    plain = 1e4 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    write_model(path, model, "llama", extra={"rope_freqs.weight": (plain / scaled).astype(np.float32)})
    torch.testing.assert_close(logits(load(path).model), logits(model), rtol=1e-4, atol=1e-4)


def test_longrope(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    short = np.linspace(1, 1.5, 8, dtype=np.float32)
    long = np.linspace(1, 9, 8, dtype=np.float32)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": 64,
    }
    size = {**SIZE, "original_max_position_embeddings": 64, "rope_parameters": rope, "sliding_window": None}
    model = random_model("phi3", size)
    original: dict[str, Any] = {"rope.scaling.original_context_length": 64}
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    write_model(path, model, "phi3", extra=factors, **original)
    torch.testing.assert_close(logits(load(path, max_model_len=60).model), logits(model), rtol=1e-4, atol=1e-4)


def test_split_files(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    reference = written(whole, "llama", "Q4_0")
    reader = gguf.GGUFReader(whole)
    half = len(reader.tensors) // 2
    for number, tensors in enumerate([reader.tensors[:half], reader.tensors[half:]]):
        path = tmp_path / f"model-{number + 1:05}-of-00002.gguf"
        split_part(path, reader, tensors, number)
    for number in (1, 2):
        loaded = load(tmp_path / f"model-0000{number}-of-00002.gguf")
        torch.testing.assert_close(logits(loaded.model), logits(reference), rtol=1e-4, atol=1e-4)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(GgufError, match=r"part model-00002-of-00002\.gguf of the model is missing"):
        load(tmp_path / "model-00001-of-00002.gguf")


def split_part(path: Path, reader: gguf.GGUFReader, tensors: list[Any], number: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if number == 0:
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                kind = field.types[0]
                sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub_type=sub_type)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 2)
    writer.add_int32("split.tensors.count", len(reader.tensors))
    for tensor in tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = random_model("llama", SIZE)
    write_model(path, model, "llama", extra={"blk.1.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(GgufError, match=r"no place for 1 of its tensors, such as blk\.1\.attn_sinks\.weight"):
        load(path)


def test_factors_of_a_rotation_that_has_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    architecture, config, more = FAMILIES["gemma3_text"]
    factors = {"rope_freqs.weight": np.ones(16, np.float32)}
    write_model(path, random_model("gemma3_text", {**SIZE, **config}), architecture, extra=factors, **more)
    with pytest.raises(GgufError, match=r"no place for 1 of its tensors, such as rope_freqs\.weight"):
        load(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = random_model("llama", SIZE)
    wide = torch.nn.Parameter(torch.ones(97, 64), requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = wide
    write_model(path, model, "llama")
    with pytest.raises(GgufError, match=r"blk\.1\.ffn_up\.weight is \[97, 64\], and by the metadata it is \[96, 64\]"):
        load(path)
