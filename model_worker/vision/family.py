"""The composite models whose images or sounds are served, and what their text model needs to know of one.

Knows types of configs. Each entry was compared with the model's own forward pass (`tests/model_worker/vision`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from interfaces import CUT_IMAGES, WHOLE_IMAGES, WHOLE_PROMPTS
from shared.listening import LISTENING_TYPES


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
    # Whether the tokens of an image see each other in layers with a window alone.
    in_windows: bool = False
    # Whether its media are sounds, and not images.
    hears: bool = False


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
    "qwen3_5": Family(grid_positions=True),
    "qwen3_5_moe": Family(grid_positions=True),
    "qwen3_vl": Family(grid_positions=True),
    "qwen3_vl_moe": Family(grid_positions=True),
    "smolvlm": Family(),
    "vipllava": Family(),
    **dict.fromkeys(LISTENING_TYPES, Family(hears=True)),
}

# Why images of some well-known types are refused.
_REASONS = {
    "gemma3n": "it needs the package timm",
    "llama4": "its forward pass fails in this version of transformers",
    "mllama": "they enter by cross-attention layers, not as tokens",
}


def is_composite(config: PreTrainedConfig) -> bool:
    """Whether the model takes images or sounds beside text."""
    is_known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or config.model_type in LISTENING_TYPES
    return is_known and "text_config" in config.sub_configs


def composite_class(config: PreTrainedConfig) -> Any:
    """Return the class of a composite model. transformers lists those that hear among the encoder-decoders."""
    hears = config.model_type in LISTENING_TYPES
    mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if hears else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return mapping[type(config)]


def family_of(config: PreTrainedConfig) -> Family | None:
    """The family of a composite model; None if its images are not served."""
    family = _FAMILIES.get(config.model_type)
    if config.model_type != "gemma4" or family is None:
        return family
    match _later_tokens(config):
        case None:
            return family
        case "vision":
            return family._replace(sight=Sight.IMAGE, in_windows=True)
        case _:
            return None


def why_refused(config: PreTrainedConfig) -> str:
    """Explain why `family_of` knows none."""
    reason = _REASONS.get(config.model_type, "they have not been verified for this type of model")
    if config.model_type in _FAMILIES:
        reason = f"use_bidirectional_attention is {_later_tokens(config)!r}, so no token could be generated"
    return f"its images are not supported: {reason}. --no-vision serves its text alone"


def _later_tokens(config: PreTrainedConfig) -> str | None:
    """Which tokens of a Gemma 4 see later ones: none, "vision" (the larger models), or "all"."""
    found: str | None = getattr(config.get_text_config(decoder=True), "use_bidirectional_attention", None)
    return found
