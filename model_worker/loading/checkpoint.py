"""Reads a checkpoint's config, and refuses what in it cannot be served before any weight is read."""

from __future__ import annotations

import errno
import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from model_worker.hearing.encoder import hears
from model_worker.kv_cache import CODE_DTYPES
from model_worker.model import ModelRefused
from model_worker.recurrent.families import HYBRID_LAYERS, is_recurrent, layer_types_of, proven_names, proven_types
from model_worker.vision.family import composite_class, family_of, is_composite, why_refused
from shared.load_errors import broken_file, missing_weights

# What transformers' configs call the layers whose only state is a KV cache.
PAGED_LAYERS = {"full_attention", "sliding_attention", "attention"}

# What packing many sequences into one forward pass takes.
NEEDED_ARGUMENTS = {"position_ids", "logits_to_keep"}

QUANTIZATIONS = ("none", "int8")
# Many times as many as the deepest models have.
_MOST_LAYERS = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def weights_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown: use one of auto, {', '.join(DTYPES)}")
    if dtype == "float16" and device.type == "cpu":
        raise ValueError("dtype 'float16' is not supported on the CPU: use bfloat16 (same memory) or float32 (exact)")
    return DTYPES[dtype]


def check_quantization(quantization: str, device: torch.device) -> None:
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is unknown: use one of {', '.join(QUANTIZATIONS)}")
    if quantization != "none" and device.type != "cpu":
        raise ValueError(
            f"quantization {quantization!r} is not supported on {device}, only on the CPU: "
            "use quantization none, or devices cpu"
        )


def check_kv_dtype(kv_dtype: str, device: torch.device) -> None:
    if kv_dtype != "auto" and kv_dtype not in CODE_DTYPES:
        raise ValueError(f"kv_dtype {kv_dtype!r} is unknown: use one of auto, {', '.join(CODE_DTYPES)}")
    if kv_dtype != "auto" and device.type != "cpu":
        raise ValueError(
            f"kv_dtype {kv_dtype!r} is not supported on {device}, only on the CPU: use kv_dtype auto, or devices cpu"
        )


def check_device(device: torch.device) -> None:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceMissing(device)


class DeviceMissing(OSError):
    """The GPU does not exist now. One whose driver is still being loaded comes later."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(errno.ENODEV, f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs, not {device}")

    def __str__(self) -> str:
        return f"{self.strerror}; `tokenyard doctor` says what is there"


def read_config(source: str | Path) -> PreTrainedConfig:
    """Read the model's config, from a directory or from the hub (or its local cache)."""
    path = Path(source).expanduser()
    looks_local = isinstance(source, Path) or source.startswith((".", "/", "~"))
    if looks_local and not path.is_dir():
        raise ModelRefused(str(source), "there is no such directory")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelRefused(
            str(source), f"the directory has no config.json, so it is not a Hugging Face model; {missing_weights(path)}"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path if path.is_dir() else source, trust_remote_code=False
        )
        return config
    except Exception as error:  # transformers computes with the values of a config, so that anything may come
        reason = broken_file(str(path)) or f"config.json cannot be used: {_said(error)}"
        if "trust_remote_code" in str(error):
            reason = "it needs Python code of its own (trust_remote_code), and code from a checkpoint is never run"
        elif not path.is_dir():
            reason = f"there is no such directory here, and as a hub name: {reason}"
        raise ModelRefused(str(source), reason) from error


def _said(error: Exception) -> str:
    """Say in one line what transformers says of a config; errors about a field have the field in one of their lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}" if lines else type(error).__name__


def _refuse_sizes(name: str, config: PreTrainedConfig) -> None:
    """Refuse a number of layers that no model has: transformers would make them one by one, without an end."""
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(count, int) and count > _MOST_LAYERS:
        raise ModelRefused(
            name, f"config.json has num_hidden_layers {count}, and at most {_MOST_LAYERS} are served: download it anew"
        )


def _refuse_names(name: str, config: PreTrainedConfig) -> None:
    """Refuse names in a config that transformers would look up when it makes the model."""
    text = config.get_text_config(decoder=True)
    activation = getattr(text, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        raise ModelRefused(name, f"config.json has hidden_act {activation!r}, which transformers does not know")
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        # "default" needs no function of its own.
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise ModelRefused(
                name,
                f"config.json has rope_type {kind!r}, which transformers does not know for this model; it knows "
                f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))}",
            )


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rope parameters of a config: of all layers, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    each = [value for value in found.values() if isinstance(value, dict)]
    return each if each and len(each) == len(found) else [found]


def _refuse_layers(name: str, config: PreTrainedConfig, stateful: bool) -> None:
    """Refuse layers that are neither attention over a KV cache nor recurrent ones of an architecture that is served."""
    layer_types = layer_types_of(config)
    other = sorted(layer_types - PAGED_LAYERS - proven_types(config))
    known = f"a state of each sequence is kept for recurrent layers of {proven_names()} alone"
    if other:
        # Of the others, attention in chunks alone keeps no state.
        more = "" if other == ["chunked_attention"] else f"; {known}"
        raise ModelRefused(
            name,
            f"its layers of type {', '.join(other)} are not full or sliding-window attention over a KV cache{more}",
        )
    # A hybrid architecture may be configured without its recurrent layers; if it is, its layer types say so.
    if stateful and not layer_types:
        raise ModelRefused(name, f"it keeps a recurrent state, and {known}")
    if is_recurrent(config) and not layer_types & (PAGED_LAYERS | HYBRID_LAYERS):
        raise ModelRefused(name, "all its layers are recurrent, and a model without any attention is not served")


def refuse_by_config(config: PreTrainedConfig, vision: bool = True) -> str:
    """Refuse a config that cannot work before any weight is read. Returns the name of the architecture.

    A model that takes images is refused if its images are not supported, unless there is to be no `vision`.
    """
    name: str = (config.architectures or [config.model_type])[0]
    if hears(config):
        return name
    if config.is_encoder_decoder:
        raise ModelRefused(
            name,
            "it is an encoder-decoder, and only decoders are served: a pass over the whole input and attention to it "
            "are missing here",
        )
    composite = is_composite(config)
    if composite:
        model_class: Any = composite_class(config)
        if vision and family_of(config) is None:
            raise ModelRefused(model_class.__name__, why_refused(config))
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelRefused(name, f"transformers has no decoder (causal language model) for {config.model_type!r}")
    else:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = model_class.__name__
    _refuse_sizes(name, config)
    _refuse_names(name, config)
    _refuse_layers(name, config, bool(getattr(model_class, "_is_stateful", False)))
    if not model_class._can_set_attn_implementation():
        raise ModelRefused(name, "its attention does not go through transformers' attention registry")
    if not composite and (lacking := NEEDED_ARGUMENTS - set(inspect.signature(model_class.forward).parameters)):
        raise ModelRefused(name, f"its forward pass takes no {' and no '.join(sorted(lacking))}")
    return name
