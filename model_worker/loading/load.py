"""Loads a model with transformers and verifies that it works on the paged KV cache, or refuses it with the reason.

Knows the steps. Does not know how many blocks the model will get, nor its user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from model_worker.hearing.encoder import hears
from model_worker.loading.checkpoint import (
    check_device,
    check_kv_dtype,
    check_quantization,
    read_config,
    refuse_by_config,
    weights_dtype,
)
from model_worker.loading.composite import take_apart
from model_worker.loading.gguf.load import gguf_config, load_gguf
from model_worker.loading.kept import Keeping
from model_worker.loading.prepare import prepare
from model_worker.loading.rope import pin_rope
from model_worker.loading.speech import computed_dtype, prepare_speech, refuse_options
from model_worker.loading.weights import load_weights, reported_weights
from model_worker.model import LoadedModel, ModelRefused, Progress, check_positions, max_position_of
from model_worker.vision.family import Sight, is_composite
from shared.gguf.file import open_gguf
from shared.gguf.format import is_gguf


def load_model(
    source: str | Path,
    dtype: str,
    device: str,
    progress: Progress,
    max_model_len: int | None = None,
    quantization: str = "none",
    has_kernels: Callable[[torch.dtype, str], bool] = lambda *_: True,
    vision: bool = True,
    kv_dtype: str = "auto",
    overlays: Sequence[Path] = (),
    keeping: Keeping | None = None,
) -> LoadedModel:
    """Load a Hugging Face directory or hub name, or a GGUF file.

    `dtype` is "auto" (the checkpoint's, but bfloat16 for a float16 one on a CPU) or a key of DTYPES. `max_model_len` is
    the longest sequence that will be served, the model's own limit by default. `quantization` is one of QUANTIZATIONS:
    int8 quantizes the weights of linear layers, per output, and verifies the model against itself with these weights.
    `has_kernels` says for the weights' dtype whether the kernels of a CPU are compiled. Without `vision` a model that
    takes images serves text alone. `kv_dtype` is auto (K and V have the weights' dtype), int8 or fp8. The tensors in
    the files of `overlays` take the place of the checkpoint's own. Weights that `keeping` has are not read, and others
    are given to it when the model is finished; not those of recognisers and GGUF files.
    """
    target = torch.device(device)
    wanted_dtype = weights_dtype(dtype, target)
    check_quantization(quantization, target)
    check_kv_dtype(kv_dtype, target)
    check_device(target)
    if target.index is not None and target.type == "cuda":
        # Streams and graphs are made on the current device, and kernels are launched there.
        torch.cuda.set_device(target)
    gguf = open_gguf(source) if is_gguf(source) else None
    config = read_config(source) if gguf is None else gguf_config(gguf)
    architecture = refuse_by_config(config, vision)
    if hears(config):
        refuse_options(architecture, quantization, kv_dtype, bool(overlays))
        speech_dtype = computed_dtype(wanted_dtype, config, target)
        with reported_weights(progress):
            recogniser = load_weights(source, config, architecture, speech_dtype, target)
        nn.Module.to(recogniser, target)
        return prepare_speech(recogniser.eval(), target, max_model_len, has_kernels)
    max_position = max_position_of(config)
    check_positions(max_model_len, max_position)

    def ready(model: PreTrainedModel) -> LoadedModel:
        if target.type == "cpu":
            _half_as_bfloat16(model)
        nn.Module.to(model, target)
        if keeping is not None:
            keeping.note(model, vision)
        if max_position is not None:
            pin_rope(model, min(max_position, max_model_len or max_position))
        return _prepared(model.eval(), config, target, quantization, progress, has_kernels, vision, kv_dtype)

    if keeping is not None:
        with reported_weights(progress):
            found = keeping.prepared(config, architecture, ready)
        if found is not None:
            return replace(found, kept=keeping.weights)
    with reported_weights(progress):
        if gguf is None:
            model = load_weights(source, config, architecture, wanted_dtype, target, overlays)
        elif overlays:
            raise ModelRefused(
                architecture,
                f"{source} is a GGUF file, whose tensors cannot be replaced one by one: update from a folder or file",
            )
        else:
            model = load_gguf(gguf, config, architecture, wanted_dtype, target)
    prepared = ready(model)
    if keeping is None:
        return prepared
    keeping.keep()
    return replace(prepared, kept=keeping.weights)


def _prepared(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    target: torch.device,
    quantization: str,
    progress: Progress,
    has_kernels: Callable[[torch.dtype, str], bool],
    vision: bool,
    kv_dtype: str,
) -> LoadedModel:
    """Make a model with its weights ready, and its encoder of images where it has one."""
    if not is_composite(config):
        return prepare(model, target, quantization, progress, has_kernels, kv_dtype)
    text, encoder = take_apart(model, target, vision)
    fuses = encoder is None or encoder.family.sight == Sight.CAUSAL
    prepared = prepare(text, target, quantization, progress, has_kernels, kv_dtype, fuses)
    if encoder is not None and encoder.family.in_windows:
        params = [replace(layer, looks_ahead=layer.sliding_window is not None) for layer in prepared.attention.params]
        prepared = replace(prepared, attention=replace(prepared.attention, params=tuple(params)))
    return replace(prepared, encoder=encoder)


def _half_as_bfloat16(model: PreTrainedModel) -> None:
    """Convert float16 parameters to bfloat16: CPUs have no fast float16, and bfloat16 takes the same memory.

    Buffers (rotary frequencies) keep their dtype.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.float16:
            parameter.data = parameter.data.to(torch.bfloat16)
