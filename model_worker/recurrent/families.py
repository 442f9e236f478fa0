"""The architectures whose recurrent layers are served.

Each was compared with transformers (tests/model_worker/recurrent).
"""

from __future__ import annotations

from transformers import PreTrainedConfig

# By the type of the text model: its types of layers, beside attention.
_PROVEN: dict[str, set[str]] = {
    "bamba": {"linear_attention"},
    "falcon_h1": {"hybrid"},
    "granitemoehybrid": {"linear_attention"},
    "kimi_linear": {"linear_attention"},
    "lfm2": {"conv"},
    "lfm2_moe": {"conv"},
    "nemotron_h": {"linear_attention", "mlp", "moe"},
    "olmo_hybrid": {"linear_attention"},
    "qwen3_5_moe_text": {"linear_attention"},
    "qwen3_5_text": {"linear_attention"},
    "qwen3_next": {"linear_attention"},
}

# Types of layers that attend and keep a state, and all that keep one.
HYBRID_LAYERS = {"hybrid"}
_RECURRENT = {"conv", "linear_attention"} | HYBRID_LAYERS


def layer_types_of(config: PreTrainedConfig) -> set[str]:
    """Return the types of the layers of the text model, as its config names them; none where it does not."""
    return set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def proven_types(config: PreTrainedConfig) -> set[str]:
    """Return the types of layers that are served of this architecture, beside attention."""
    return _PROVEN.get(config.get_text_config(decoder=True).model_type, set())


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether a config that is served has recurrent layers."""
    return bool(layer_types_of(config) & _RECURRENT)


def proven_names() -> str:
    """Return the architectures in words."""
    return ", ".join(sorted(_PROVEN))
