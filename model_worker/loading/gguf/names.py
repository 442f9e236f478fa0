"""Which tensors of a GGUF file make a weight of transformers' model, and how.

Knows the names on both sides. Does not know files, nor how weights are kept.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from shared.gguf.config import LONG_FACTORS, SHORT_FACTORS

# The factors of Llama 3's rotation, one for each frequency.
ROTARY_FACTORS = "rope_freqs.weight"
# Tensors that are no weights: the loader reads them otherwise, or the config does.
NO_WEIGHTS = frozenset([ROTARY_FACTORS, LONG_FACTORS, SHORT_FACTORS])

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Modules of a layer in transformers, and in the file.
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# Gemma 2 and 3 have a norm before and behind attention and MLP.
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT_OSS = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
# The weights of gpt-oss that are named by themselves: their tensors.
_OF_GPT_OSS = {
    "self_attn.sinks": ("attn_sinks.weight",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
}
_EXPERTS = {"mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down_proj": ("ffn_down_exps",)}


_OF_ARCHITECTURES = {"gemma2": _FOUR_NORMS, "gemma3": _FOUR_NORMS, "gpt-oss": _GPT_OSS}


class Change(Enum):
    """What must be done with a tensor to get the weight."""

    NOTHING = "nothing"
    EXPERTS = "experts"  # matrices of experts lie the other way round, and outputs of two tensors take turns
    TAKE_TURNS = "take turns"  # the outputs of two vectors for each expert do, too
    JOIN = "join"  # the outputs of each expert's second tensor come behind those of its first
    LESS_ONE = "less one"  # the file has the norm's weight plus one
    REORDER_QUERY = "reorder query"  # the rows of each head are in the order of llama.cpp's rotation
    REORDER_KEY = "reorder key"


class Source(NamedTuple):
    """The tensors of a weight."""

    names: tuple[str, ...]
    change: Change = Change.NOTHING


def source_of(architecture: str, name: str) -> Source | None:
    """Return what makes the weight of this name in transformers; None for one that no file has."""
    gemma = architecture.startswith("gemma")
    norm = Change.LESS_ONE if gemma and name.endswith("norm.weight") else Change.NOTHING
    if name in _OUTER:
        return Source((_OUTER[name],), norm)
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    layer, inner = found.groups()
    if architecture == "gpt-oss" and inner in _OF_GPT_OSS:
        names = tuple(f"blk.{layer}.{tensor}" for tensor in _OF_GPT_OSS[inner])
        if inner.startswith("mlp.experts"):
            return Source(names, Change.TAKE_TURNS if inner.endswith("bias") else Change.EXPERTS)
        return Source(names)
    if inner in _EXPERTS:
        names = tuple(f"blk.{layer}.{tensor}.weight" for tensor in _EXPERTS[inner])
        return Source(names, Change.JOIN if len(names) > 1 else Change.NOTHING)
    module, _, kind = inner.rpartition(".")
    modules = {**_INNER, **_OF_ARCHITECTURES.get(architecture, {})}
    if module not in modules:
        return None
    change = norm
    if architecture in ("llama", "mistral"):
        change = {"self_attn.q_proj": Change.REORDER_QUERY, "self_attn.k_proj": Change.REORDER_KEY}.get(module, norm)
    if gemma and kind == "weight" and module.endswith("norm"):
        change = Change.LESS_ONE
    return Source((f"blk.{layer}.{modules[module]}.{kind}",), change)
