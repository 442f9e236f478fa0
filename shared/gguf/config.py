"""The configuration of a GGUF model as transformers names its values, read from metadata and from tensors' shapes.

Every size that a model is built of is compared with the shape of a tensor, which fits the file. Does not know
transformers' classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from shared.gguf.file import GgufFile
from shared.gguf.format import GgufError, damaged
from shared.gguf.special_tokens import end_tokens, token_id, tokens_of

Values = dict[str, Any]

_BLOCK = re.compile(r"blk\.(\d+)\.")
_LARGEST_SIZE = 1 << 31
_MOST_LAYERS = 10_000
# Layers of the two Gemma models whose attention is scaled by the width of the model over its heads.
_WIDE_GEMMAS = {"gemma2": 46, "gemma3": 62}
# Every sixth layer of Gemma 3 sees the whole context, and of Gemma 2 every second.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
_LOCAL_THETA = 10_000.0
# Rotation scaling that llama.cpp and transformers know by the same rule.
_SCALINGS = ("none", "linear", "yarn", "longrope")
# Numbers that are divided by.
_LEAST_FACTOR = 1e-6
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"


class _Metadata:
    """The values of one architecture in a file's metadata."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.architecture

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def size(self, name: str, default: int | None = None) -> int:
        return self.file.integer(self.key(name), default, least=1, most=_LARGEST_SIZE)

    def number(self, name: str, default: float | None = None, least: float = 0.0) -> float:
        return self.file.number(self.key(name), default, least)


def config_of(file: GgufFile) -> Values:
    """Return the config with `model_type` and `architectures`. GgufError for a model that is not supported."""
    make = _CONFIGS.get(file.architecture)
    if make is None:
        known = ", ".join(_CONFIGS)
        raise GgufError(
            f"{file.path}: general.architecture is {file.architecture!r}, which is not supported; use one of {known}, "
            "or the model's Hugging Face directory"
        )
    return make(_Metadata(file))


def _base(metadata: _Metadata, model_type: str, architecture: str) -> Values:
    file = metadata.file
    hidden = metadata.size("embedding_length")
    heads = metadata.size("attention.head_count")
    kv_heads = metadata.size("attention.head_count_kv", heads)
    head_dim = metadata.size("attention.key_length", max(1, hidden // heads))
    layers = metadata.size("block_count")
    vocabulary = file.tensor("token_embd.weight").shape[0]
    _expect(file, "token_embd.weight", (vocabulary, hidden))
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise file.wrong(metadata.key("attention.value_length"), f"{head_dim}, as attention.key_length")
    present = {int(found[1]) for name in file.tensors if (found := _BLOCK.match(name))}
    if layers > _MOST_LAYERS or present != set(range(layers)):
        raise damaged(
            file.path, f"{metadata.key('block_count')} is {layers}, and it has tensors of {len(present)} blocks"
        )
    if heads % kv_heads:
        raise file.wrong(metadata.key("attention.head_count_kv"), f"a divisor of {heads}, the number of heads")
    if "blk.0.attn_qkv.weight" in file.tensors:
        _expect(file, "blk.0.attn_qkv.weight", ((heads + 2 * kv_heads) * head_dim, hidden))
    else:
        _expect(file, "blk.0.attn_q.weight", (heads * head_dim, hidden))
        _expect(file, "blk.0.attn_k.weight", (kv_heads * head_dim, hidden))
    if len(tokens_of(file)) > vocabulary:
        raise damaged(file.path, f"it has {len(tokens_of(file))} tokens, and token_embd.weight {vocabulary} rows")
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(metadata, head_dim),
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_tokens(file) or None,
        "pad_token_id": token_id(file, "padding"),
    }


def _dense(metadata: _Metadata, model_type: str, architecture: str) -> Values:
    values = _base(metadata, model_type, architecture)
    inner = metadata.size("feed_forward_length")
    _expect(metadata.file, "blk.0.ffn_down.weight", (values["hidden_size"], inner))
    return {**values, "intermediate_size": inner}


def _sparse(metadata: _Metadata, model_type: str, architecture: str, inner_name: str) -> Values:
    """Make the config of a mixture of experts, in which each layer has experts."""
    values = _base(metadata, model_type, architecture)
    experts = metadata.size("expert_count")
    inner = metadata.size(inner_name)
    _expect(metadata.file, "blk.0.ffn_down_exps.weight", (experts, values["hidden_size"], inner))
    used = metadata.file.integer(metadata.key("expert_used_count"), least=1, most=experts)
    return {**values, "num_experts": experts, "num_experts_per_tok": used, "moe_intermediate_size": inner}


def _llama(metadata: _Metadata) -> Values:
    if metadata.has("expert_count") and metadata.file.integer(metadata.key("expert_count")):
        values = _sparse(metadata, "mixtral", "MixtralForCausalLM", "feed_forward_length")
        inner = values.pop("moe_intermediate_size")
        values["num_local_experts"] = values.pop("num_experts")
        return {**values, "intermediate_size": inner, "sliding_window": None}
    values = _dense(metadata, "llama", "LlamaForCausalLM")
    tensors = metadata.file.tensors
    if "blk.0.attn_q.bias" in tensors and "blk.0.attn_output.bias" not in tensors:
        # llama.cpp takes each bias as optional. transformers' Llama has one behind attention, too, and its Qwen 2 none.
        plain = _without_head_dim(metadata, values)
        return {**plain, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    return {
        **values,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _mistral(metadata: _Metadata) -> Values:
    return {**_dense(metadata, "mistral", "MistralForCausalLM"), "sliding_window": _window(metadata)}


def _qwen2(metadata: _Metadata) -> Values:
    values = _dense(metadata, "qwen2", "Qwen2ForCausalLM")
    return {**_without_head_dim(metadata, values), "use_sliding_window": False}


def _qwen3(metadata: _Metadata) -> Values:
    return {**_dense(metadata, "qwen3", "Qwen3ForCausalLM"), "use_sliding_window": False}


def _qwen2moe(metadata: _Metadata) -> Values:
    values = _sparse(metadata, "qwen2_moe", "Qwen2MoeForCausalLM", "expert_feed_forward_length")
    shared = metadata.size("expert_shared_feed_forward_length")
    _expect(metadata.file, "blk.0.ffn_down_shexp.weight", (values["hidden_size"], shared))
    return {
        **_without_head_dim(metadata, values),
        "shared_expert_intermediate_size": shared,
        "intermediate_size": shared,
        "norm_topk_prob": False,
        "use_sliding_window": False,
    }


def _qwen3moe(metadata: _Metadata) -> Values:
    values = _sparse(metadata, "qwen3_moe", "Qwen3MoeForCausalLM", "expert_feed_forward_length")
    inner = values["moe_intermediate_size"]
    return {**values, "intermediate_size": inner, "norm_topk_prob": True, "use_sliding_window": False}


def _gpt_oss(metadata: _Metadata) -> Values:
    values = _sparse(metadata, "gpt_oss", "GptOssForCausalLM", "expert_feed_forward_length")
    inner = values.pop("moe_intermediate_size")
    values["num_local_experts"] = values.pop("num_experts")
    # Every second layer sees the whole context, beginning with the second. The bounds of YaRN are not rounded.
    rope = {**values["rope_parameters"], "truncate": False}
    window = metadata.size("attention.sliding_window")
    return {**values, "rope_parameters": rope, "intermediate_size": inner, "sliding_window": window}


def _phi3(metadata: _Metadata) -> Values:
    values = _without_head_dim(metadata, _dense(metadata, "phi3", "Phi3ForCausalLM"))
    _expect(metadata.file, "blk.0.ffn_up.weight", (2 * values["intermediate_size"], values["hidden_size"]))
    original = metadata.size("rope.scaling.original_context_length", values["max_position_embeddings"])
    return {**values, "sliding_window": _window(metadata), "original_max_position_embeddings": original}


def _gemma(metadata: _Metadata) -> Values:
    return {**_dense(metadata, "gemma", "GemmaForCausalLM"), "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(metadata: _Metadata) -> Values:
    values = _windowed_gemma(metadata, "gemma2", "Gemma2ForCausalLM")
    return {
        **values,
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(metadata: _Metadata) -> Values:
    values = _windowed_gemma(metadata, "gemma3_text", "Gemma3ForCausalLM")
    local = metadata.number("rope.freq_base_swa", _LOCAL_THETA)
    rope = {
        "full_attention": values["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return {
        **values,
        "rope_parameters": rope,
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _windowed_gemma(metadata: _Metadata, model_type: str, architecture: str) -> Values:
    values = _dense(metadata, model_type, architecture)
    layers = values["num_hidden_layers"]
    scalar = values["head_dim"]
    if layers == _WIDE_GEMMAS[metadata.architecture]:
        scalar = values["hidden_size"] // values["num_attention_heads"]
    slides = _sliding_layers(metadata, layers)
    return {
        **values,
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides],
    }


def _sliding_layers(metadata: _Metadata, layers: int) -> list[bool]:
    """Return whether each layer has a window: by an array, or by a period, whose last layer has none."""
    key = metadata.key("attention.sliding_window_pattern")
    stated = metadata.file.metadata.get(key)
    if stated is None or isinstance(stated, int):
        period = metadata.file.integer(key, _PATTERNS[metadata.architecture], least=1)
        return [(layer + 1) % period != 0 for layer in range(layers)]
    slides = metadata.file.numbers(key, "biu")
    if slides is None or len(slides) != layers:
        raise metadata.file.wrong(key, f"a number, or an array of {layers}, one for each layer")
    return [bool(slide) for slide in slides]


def _window(metadata: _Metadata) -> int | None:
    return metadata.file.integer(metadata.key("attention.sliding_window"), 0) or None


def _without_head_dim(metadata: _Metadata, values: Values) -> Values:
    """Leave out the width of heads, for models in which it follows from the others."""
    head_dim = values.pop("head_dim")
    if head_dim * values["num_attention_heads"] != values["hidden_size"]:
        wanted = f"{values['hidden_size']} / {values['num_attention_heads']} for {metadata.architecture}"
        raise metadata.file.wrong(metadata.key("attention.key_length"), wanted)
    return values


def _rope(metadata: _Metadata, head_dim: int) -> Values:
    """Return transformers' parameters of the rotation. The factors of Llama 3 are a tensor, which is no part of it."""
    file = metadata.file
    values: Values = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10_000.0, least=1.0)}
    turned = metadata.size("rope.dimension_count", head_dim)
    if turned != head_dim:
        if metadata.architecture != "phi3" or turned > head_dim:
            raise file.wrong(metadata.key("rope.dimension_count"), f"{head_dim}, the width of a head")
        values["partial_rotary_factor"] = turned / head_dim
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        return {**values, **_longrope(metadata, turned)}
    kind = file.text(metadata.key("rope.scaling.type"), "none")
    # Files write 0 for none.
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0)) or 1.0
    if factor < _LEAST_FACTOR:
        raise file.wrong(metadata.key("rope.scaling.factor"), f"0 or a number from {_LEAST_FACTOR:g}")
    if kind not in _SCALINGS or kind == "longrope":
        raise file.wrong(metadata.key("rope.scaling.type"), f"one of {', '.join(_SCALINGS[:3])}")
    if kind == "yarn":
        return {**values, **_yarn(metadata, factor)}
    # Older files have a factor without a type.
    return values if factor == 1.0 else {**values, "rope_type": "linear", "factor": factor}


def _yarn(metadata: _Metadata, factor: float) -> Values:
    context = metadata.size("context_length")
    attention = metadata.number("rope.scaling.attn_factor", metadata.number("rope.scaling.yarn_attn_factor", 1.0))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.size(
            "rope.scaling.original_context_length", max(1, round(context / factor))
        ),
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0, _LEAST_FACTOR),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0, _LEAST_FACTOR),
    }


def _longrope(metadata: _Metadata, turned: int) -> Values:
    file = metadata.file
    for name in (LONG_FACTORS, SHORT_FACTORS):
        _expect(file, name, (turned // 2,))
    values: Values = {
        "rope_type": "longrope",
        "long_factor": file.tensor(LONG_FACTORS).values().tolist(),
        "short_factor": file.tensor(SHORT_FACTORS).values().tolist(),
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length"),
    }
    if metadata.has("rope.scaling.attn_factor"):
        values["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return values


def _expect(file: GgufFile, name: str, shape: tuple[int, ...]) -> None:
    found = file.tensor(name).shape
    if found != shape:
        raise damaged(file.path, f"tensor {name} is {list(found)}, and by the metadata it should be {list(shape)}")


_CONFIGS: dict[str, Callable[[_Metadata], Values]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
}
