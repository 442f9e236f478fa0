"""The composite models whose images are served, and what their text model needs to know of an image.

Knows types of configs. Each entry was compared with the model's own forward pass (`tests/model_worker/vision`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from interfaces import CUT_IMAGES, WHOLE_IMAGES, WHOLE_PROMPTS


class Sight(IntEnum):
    """Which later keys a token of the prompt sees. The values are those of `WorkerHello.images`."""

    # None: attention is causal.
    CAUSAL = CUT_IMAGES
    # Those of the image that it stands for.
    IMAGE = WHOLE_IMAGES
    # All of the prompt.
    PROMPT = WHOLE_PROMPTS


class Family(NamedTuple):
    """What sets the image tokens of a type of model apart."""

    # Whether positions count the grid of an image in three directions (M-RoPE).
    grid_positions: bool = False
    sight: Sight = Sight.CAUSAL


_FAMILIES = {
    "aria": Family(),
    "aya_vision": Family(),
    "cohere2_vision": Family(),
    "gemma3": Family(sight=Sight.IMAGE),
    "gemma4": Family(),
    "glm46v": Family(grid_positions=True),
    "glm4v": Family(grid_positions=True),
    "glm4v_moe": Family(grid_positions=True),
    "idefics2": Family(),
    "idefics3": Family(),
    "internvl": Family(),
    "llava": Family(),
    "llava_next": Family(),
    "llava_onevision": Family(),
    "mistral3": Family(),
    "paddleocr_vl": Family(grid_positions=True),
    "paligemma": Family(sight=Sight.PROMPT),
    "qwen2_5_vl": Family(grid_positions=True),
    "qwen2_vl": Family(grid_positions=True),
    "qwen3_vl": Family(grid_positions=True),
    "qwen3_vl_moe": Family(grid_positions=True),
    "smolvlm": Family(),
}

# Why images of some well-known types are refused.
_REASONS = {
    "gemma3n": "it needs the package timm",
    "llama4": "its forward pass fails in this version of transformers",
    "mllama": "they enter by cross-attention layers, not as tokens",
}


def is_composite(config: PreTrainedConfig) -> bool:
    """Whether the model takes images beside text."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and "text_config" in config.sub_configs


def family_of(config: PreTrainedConfig) -> Family | None:
    """The family of a composite model; None if its images are not served."""
    return None if _sees_in_some_layers(config) else _FAMILIES.get(config.model_type)


def why_refused(config: PreTrainedConfig) -> str:
    """Explain why `family_of` knows none."""
    reason = _REASONS.get(config.model_type, "they have not been verified for this type of model")
    if _sees_in_some_layers(config):
        reason = "their tokens see each other in the layers with a window alone, which no kernel here knows"
    return f"its images are not supported: {reason}. --no-vision serves its text alone"


def _sees_in_some_layers(config: PreTrainedConfig) -> bool:
    """Whether it is one of the larger models of Gemma 4."""
    text = config.get_text_config(decoder=True)
    return config.model_type == "gemma4" and getattr(text, "use_bidirectional_attention", None) is not None
