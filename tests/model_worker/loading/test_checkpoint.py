"""Loading: the facts that a loaded model tells, what it takes from the checkpoint, and refusals with their reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model_worker.batch import ForwardBatch
from model_worker.loading import checkpoint, weights
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, ModelRefused, max_position_of
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import save_random_model, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 193,
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
ALIBI_OR_OWN = "attention does not go through transformers' attention registry"
RECURRENT = "linear_attention are not full or sliding-window attention"


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def load(source: Path | str, dtype: str = "auto", **options: Any) -> LoadedModel:
    return load_model(source, dtype, "cpu", lambda phase, done, total: None, **options)


def altered(path: Path, copy: Path, **config: Any) -> Path:
    """A copy of a checkpoint with other config values."""
    shutil.copytree(path, copy)
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**values, **config}))
    return copy


def test_facts_of_a_model(directory: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    loaded = load_model(
        tiny_model("gemma2", directory), "auto", "cpu", lambda phase, done, total: calls.append((phase, done, total))
    )
    assert (loaded.architecture, loaded.vocab_size, loaded.max_position) == ("Gemma2ForCausalLM", 193, 512)
    assert (loaded.dtype, loaded.eos_token_ids) == (torch.float32, (2,))
    assert loaded.parameter_count > 12_500
    assert 4 * loaded.parameter_count <= loaded.parameter_bytes < 6 * loaded.parameter_count, "packed, so padded"
    assert [(p.sliding_window, p.softcap) for p in loaded.attention.params] == [(8, 2.0), (None, 2.0), (8, 2.0)]
    assert [(s.kv_heads, s.k_dim, s.v_dim) for s in loaded.attention.layout.layers] == [(2, 24, 24)] * 3
    weights = len(load_file(tiny_model("gemma2", directory) / "model.safetensors"))
    loading = [call for call in calls if call[0] == "load weights"]
    assert loading == [("load weights", done, weights) for done in range(weights + 1)]


def test_several_end_tokens_come_from_the_generation_config(directory: Path, tmp_path: Path) -> None:
    path = altered(tiny_model("llama", directory), tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9]}))
    assert load(path).eos_token_ids == (2, 7, 9)
    (path / "generation_config.json").unlink()
    assert load(path).eos_token_ids == (2,)


@pytest.mark.parametrize(("stored", "asked", "used"), [
    (torch.bfloat16, "auto", torch.bfloat16),
    (torch.float16, "auto", torch.bfloat16),
    (torch.float32, "bfloat16", torch.bfloat16),
    (torch.bfloat16, "float32", torch.float32),
])  # fmt: skip
def test_dtype(stored: torch.dtype, asked: str, used: torch.dtype, directory: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2", directory), dtype=stored)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, asked)
    assert (loaded.dtype, loaded.attention.layout.dtype) == (used, used)
    frequencies = {buffer.dtype for name, buffer in loaded.model.named_buffers() if "inv_freq" in name}
    assert frequencies == {torch.float32}


def test_float16_on_a_cpu_and_unknown_dtypes_are_named(directory: Path) -> None:
    with pytest.raises(ValueError, match="'float16' is not supported on the CPU: use bfloat16"):
        load(tiny_model("llama", directory), "float16")
    with pytest.raises(ValueError, match="'int4' is unknown: use one of auto, float32, bfloat16, float16"):
        load(tiny_model("llama", directory), "int4")


# What transformers' own classes say of themselves, with real configs of the families that cannot be served.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {**SMALL, "state_size": 4}, RECURRENT),
    "mamba2": ("mamba2", {**SMALL, "num_heads": 4, "head_dim": 24, "n_groups": 1, "state_size": 8}, RECURRENT),
    "jamba": ("jamba", {**SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, RECURRENT),
    "recurrent_gemma": ("recurrent_gemma", SMALL, RECURRENT),
    "rwkv": ("rwkv", {**SMALL, "attention_hidden_size": 48}, "keeps a recurrent state, and a state of each"),
    "minimax": ("minimax", {**SMALL, "num_local_experts": 2}, RECURRENT),
    "granite without attention": (
        "granitemoehybrid",
        {**SMALL, "layer_types": ["mamba", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 24},
        "all its layers are recurrent, and a model without any attention is not served",
    ),
    "granite with limits": (
        "granitemoehybrid",
        {
            **SMALL,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 24,
            "time_step_limit": [0.0, 0.1],
        },
        r"time_step_limit \[0.0, 0.1\], which transformers applies to prompts alone",
    ),
    "llama4": (
        "llama4_text",
        {**SMALL, "num_local_experts": 2},
        "chunked_attention are not full or sliding-window .* cache$",
    ),
    "bloom": ("bloom", {"vocab_size": 193, "hidden_size": 48, "n_layer": 1, "n_head": 4}, ALIBI_OR_OWN),
    "mpt": ("mpt", {"vocab_size": 193, "d_model": 64, "n_layers": 1, "n_heads": 4}, ALIBI_OR_OWN),
    "falcon": ("falcon", {**SMALL, "alibi": True}, ALIBI_OR_OWN),
    "bert": ("bert", {**SMALL, "is_decoder": False}, "attends to more or less than a causal window"),
    "bart decoder": ("bart", {**SEQ2SEQ, "is_decoder": True}, "its forward pass takes no position_ids"),
    "whisper decoder": ("whisper", {**SEQ2SEQ, "is_decoder": True}, "takes no logits_to_keep and no position_ids"),
    "roberta": ("roberta", {**SMALL, "is_decoder": True, "pad_token_id": 1}, "gives other logits"),
    "doge": ("doge", {**SMALL, "num_experts": 2, "is_moe": False}, "adds something of its own to its mask"),
    "diffllama": ("diffllama", SMALL, "runs more than once per token"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_served_are_refused(family: str, tmp_path: Path) -> None:
    arch, config, reason = REFUSED[family]
    save_random_model(arch, tmp_path, 0, {"eos_token_id": 2, **config})
    with pytest.raises(ModelRefused, match=reason) as refusal:
        load(tmp_path)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    assert str(refusal.value).startswith(f"{architecture} cannot be served: ")


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    values = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 48}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelRefused, match=r"T5ForConditionalGeneration cannot be served: it is an encoder-decoder"):
        load(tmp_path)


def test_hybrid_without_its_recurrent_layers_is_served(tmp_path: Path) -> None:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 24, "num_local_experts": 0, "num_experts_per_tok": 0}
    config = {**SMALL, **mamba, "layer_types": ["attention", "attention"], "shared_intermediate_size": 64}
    save_random_model("granitemoehybrid", tmp_path, 0, config)
    assert len(load(tmp_path).attention.params) == 2


def test_latent_attention_is_served_with_unequal_heads(tmp_path: Path) -> None:
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    config = {**SMALL, **ranks, **experts, "num_key_value_heads": 4, "topk_group": 1, "first_k_dense_replace": 1}
    save_random_model("deepseek_v3", tmp_path, 0, config)
    assert [(s.kv_heads, s.k_dim, s.v_dim) for s in load(tmp_path).attention.layout.layers] == [(4, 16, 12)] * 2


@pytest.mark.parametrize(("change", "reason"), [
    ({"quantization_config": {"quant_method": "higgs", "bits": 4}}, "quant_method 'higgs', which cannot be read here"),
    ({"hidden_act": "sillu"}, "hidden_act 'sillu', which transformers does not know"),
    ({"num_attention_heads": "4"}, "config.json cannot be used: .*num_attention_heads"),
    ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope_type 'mrope', which transformers does not"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "Missing required keys .*'yarn'.*factor"),
    ({"dtype": "float64"}, "dtype float64, in which nothing is computed here: use --dtype float32"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000, and at most 4096 are served"),
    ({"num_hidden_layers": 5}, r"lacks 18 of its weights, such as model\.layers\.3"),
    ({"hidden_size": 96}, r"do not fit its config: lm_head.weight is \[193, 48\] and should be \[193, 96\]"),
    ({"model_type": "unheard_of"}, "unheard_of. but Transformers does not recognize"),
    ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}, "code from a checkpoint is never run"),
])  # fmt: skip
def test_checkpoints_that_cannot_be_loaded(
    change: dict[str, Any], reason: str, directory: Path, tmp_path: Path
) -> None:
    path = altered(tiny_model("llama", directory), tmp_path / "model", **change)
    with pytest.raises(ModelRefused, match=reason):
        load(path)


def test_broken_files_are_refused(directory: Path, tmp_path: Path) -> None:
    path = altered(tiny_model("llama", directory), tmp_path / "model")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM cannot be served: .*should have"):
        load(path)
    weights.rename(path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"only pickles \(pytorch_model\.bin\)"):
        load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"config\.json: Expecting property name"):
        load(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelRefused, match=r"no config\.json"):
        load(path)


def test_missing_directories_and_hub_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for source in (tmp_path / "none", str(tmp_path / "none"), "./none"):
        with pytest.raises(ModelRefused, match="there is no such directory"):
            load(source)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelRefused, match=r"no-such/model cannot be served: .* as a hub name: "):
        load("no-such/model")


def test_hidden_state_is_found_by_the_self_check(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer looks harmless to the probe, but carries something from token to token outside the KV cache."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    real = LlamaAttention.forward

    def own_way(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = real(self, hidden_states, *args, **kwargs)
        return out + torch.roll(hidden_states, 1, dims=1), weights

    monkeypatch.setattr(LlamaAttention, "forward", own_way)
    with pytest.raises(ModelRefused, match="gives other logits than the model's own attention"):
        load(tiny_model("llama", directory))


@pytest.mark.parametrize("rope", [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "mscale": 0.7,
     "mscale_all_dim": 1.0, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 6, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
     "original_max_position_embeddings": 16},
])  # fmt: skip
def test_numbers_of_each_rope_are_those_of_transformers_beyond_the_original_length(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    config = {**SMALL, "max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, **rope}}
    save_random_model("llama", tmp_path, 0, config)
    tokens = np.arange(3, 60)
    count = np.array([len(tokens)])
    batch = ForwardBatch.build(tokens, count, count, np.arange(8)[None], 8, np.arange(len(tokens)))
    loaded = load(tmp_path)
    got = ModelRunner(loaded, 8, 8).backend.logits(batch)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(got, model(torch.tensor(tokens[None])).logits[0], rtol=1e-4, atol=1e-4)
    default = {"rope_type": "default", "rope_theta": 1e4}
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters=default)
    far = plain(torch.tensor(tokens[None])).logits[0, -1]
    assert rope["rope_type"] == "dynamic" or not torch.allclose(got[-1], far, rtol=1e-3, atol=1e-3)


def test_longrope_rows_do_not_depend_on_their_neighbours(tmp_path: Path) -> None:
    """Frequencies are chosen once, by the longest sequence that will be served."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = {**SMALL, "num_key_value_heads": 4, "max_position_embeddings": 64, "rope_parameters": rope}
    save_random_model("phi3", tmp_path, 0, {**config, "original_max_position_embeddings": 16})
    tokens = np.random.default_rng().integers(3, 193, 40)

    def logits(loaded: LoadedModel, lens: list[int]) -> torch.Tensor:
        """Of the last token of each prefix of `tokens`, all in one forward pass."""
        backend = ModelRunner(loaded, 16, 8, attention="reference").backend
        tables = np.arange(len(lens) * 5, dtype=np.int32).reshape(len(lens), 5)
        packed = np.concatenate([tokens[:n] for n in lens])
        ends = np.cumsum(lens) - 1
        return backend.logits(ForwardBatch.build(packed, np.array(lens), np.array(lens), tables, 8, ends))

    long, short = load(tmp_path), load(tmp_path, max_model_len=16)
    torch.testing.assert_close(logits(long, [10]), logits(long, [10, 40])[:1])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(
        logits(long, [40])[0], model(torch.tensor(tokens[None])).logits[0, -1], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        logits(short, [10])[0], model(torch.tensor(tokens[None, :10])).logits[0, -1], rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(logits(long, [10]), logits(short, [10]), rtol=1e-2)


def test_frequencies_that_never_change_are_not_asked_for(tmp_path: Path) -> None:
    """Transformers would compare the largest position in each pass, which waits for a GPU."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_parameters": rope}
    save_random_model("llama", tmp_path, 0, config)
    loaded = load(tmp_path)
    kinds = [module.rope_type for module in loaded.model.modules() if hasattr(module, "rope_type")]
    assert kinds == ["default"]
    tokens = np.random.default_rng().integers(3, 193, 60)
    length = np.array([60])
    batch = ForwardBatch.build(tokens, length, length, np.arange(8)[None], 8, np.array([59]))
    got = ModelRunner(loaded, 8, 8, attention="reference").backend.logits(batch)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.model.rotary_emb.rope_type == "dynamic"
    torch.testing.assert_close(got[0], model(torch.tensor(tokens[None])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_weights_are_those_of_the_checkpoint(directory: Path, tmp_path: Path) -> None:
    path = altered(tiny_model("llama", directory), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tokens, three = np.array([5, 6, 7]), np.array([3])
    batch = ForwardBatch.build(tokens, three, three, np.zeros((1, 1), np.int32), 8, np.arange(3))
    logits = ModelRunner(load(path), 1, 8).backend.logits(batch)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(logits, model(torch.tensor(tokens[None])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            512,
        ),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
    ],
)
def test_only_yarn_makes_the_context_longer_than_the_config_says(rope: Any, limit: int, directory: Path) -> None:
    path = tiny_model("llama", directory, rope_parameters={"rope_theta": 1e4, **rope})
    config = checkpoint.read_config(path)
    assert max_position_of(config) == limit


def test_weights_that_are_not_finite_are_named(directory: Path, tmp_path: Path) -> None:
    path = altered(tiny_model("llama", directory), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelRefused, match=r"48 of the 3072 values of model\.layers\.1\.mlp\.up_proj\.weight are not fini"
    ):
        load(path)


def test_indexes_of_shards_are_checked(directory: Path, tmp_path: Path) -> None:
    path = altered(tiny_model("llama", directory), tmp_path / "model")
    index = path / "model.safetensors.index.json"
    for weight_map, reason in (
        ({}, "has an empty weight_map"),
        ({"a": "model-00001.safetensors"}, r"model-00001\.safetensors, which .* names, is missing"),
        ({"a": "../model.safetensors"}, "files must lie beside it"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelRefused, match=reason):
            load(path)
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    index.unlink()
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"it is an adapter .* serve its base some/base"):
        load(path)


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_weights_are_read_straight_to_a_gpu(
    has_accelerate: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands for the GPU that transformers is asked to read to."""
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    read = AutoModelForCausalLM.from_pretrained
    asked: list[Any] = []

    def reads(source: Path, **options: Any) -> Any:
        asked.append(options.pop("device_map", None))
        return read(source, **options, **({"device_map": {"": "cpu"}} if asked[-1] else {}))

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reads)
    monkeypatch.setattr(weights, "is_accelerate_available", lambda: has_accelerate)
    gpu = torch.device("cuda:1")
    model = weights.load_weights(path, checkpoint.read_config(path), "Llama", "auto", gpu)
    assert asked == [{"": gpu} if has_accelerate else None]
    want = load_file(path / "model.safetensors")
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in want.items() if name in found)
    assert len(found) == len(want)
