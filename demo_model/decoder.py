"""The decoder of the embedded model by itself, in transformers' Llama class.

Knows how the folder names its weights, with eyes and without. Does not know what they were trained on.
"""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig, LlamaForCausalLM


def text_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The decoder of a folder, whose model may have eyes or none."""
    config: Any = AutoConfig.from_pretrained(folder)
    model: Any = LlamaForCausalLM(config.get_text_config())
    weights = {_name(name): weight for name, weight in load_file(folder / "model.safetensors").items()}
    known = model.state_dict().keys() & weights.keys()
    lacking = model.state_dict().keys() - weights.keys() - {"lm_head.weight"}
    if lacking:
        raise ValueError(f"{folder} lacks weights of the decoder, such as {sorted(lacking)[0]}")
    model.load_state_dict({name: weights[name] for name in known}, strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return cast(LlamaForCausalLM, model.to(dtype).eval())


def _name(stored: str) -> str:
    """The name in the Llama class of a weight of either class."""
    _, is_inner, inner = stored.rpartition("language_model.")
    return f"model.{inner.removeprefix('model.')}" if is_inner else stored
