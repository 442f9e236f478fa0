"""Loads the codec that speech.json names beside a model that generates speech tokens, or refuses it with the reason.

Knows the files. Does not know who asks for the sound.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.utils import parametrize

from model_worker.loading.checkpoint import read_config
from model_worker.loading.weights import LOAD_ERRORS, reported_weights
from model_worker.model import ModelRefused, Progress, first_line
from model_worker.speech.codec import Decode, SpeechCodec, transformers_decode
from model_worker.speech.encode_clips import encoder_of
from model_worker.speech.snac import SnacDecoder, plain_weights
from shared.codec_files import SNAC, CodecFiles
from shared.load_errors import broken_file
from shared.pooling_modules import file_of
from shared.speech_tokens import SpeechTokenFiles

# The class of each kind of codec in transformers.
_CLASSES = {"dac": "DacModel", "mimi": "MimiModel", "xcodec2": "Xcodec2Model", "neucodec": "NeuCodecModel"}
# Parts that only encode: their weights may be missing, and take no memory.
_ENCODERS = ("encoder", "encoder_transformer", "downsample", "semantic_encoder", "acoustic_encoder", "semantic_model")


def load_codec(
    speech: SpeechTokenFiles,
    device: str,
    max_model_len: int,
    progress: Progress = lambda _what, _done, _total: None,
    encodes: bool = False,
) -> SpeechCodec:
    """Load the codec in float32, and measure it; with `encodes` its encoder, too.

    ValueError says why it cannot be used.
    `max_model_len` are the most tokens of the model's texts; windows may be longer.
    """
    files = speech.codec
    target = torch.device(device)
    encode = None
    if files.kind == SNAC:
        if encodes:
            raise ModelRefused(SNAC, "it only decodes here, and voice_clips needs one that encodes: leave it out")
        decode = _snac(files, target)
    else:
        model = _transformers(files, target, progress, encodes)
        decode = transformers_decode(model)
        encode = encoder_of(files.kind, model) if encodes else None
    codec = SpeechCodec(
        decode=decode,
        encode=encode,
        files=files,
        codebooks=speech.codebooks,
        device=target,
        weights=torch.float32,
        max_model_len=max_model_len,
    )
    try:
        _ = codec.facts
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelRefused(files.kind, f"it cannot decode codes: {first_line(error)}") from error
    return codec


def _transformers(files: CodecFiles, device: torch.device, progress: Progress, encodes: bool) -> Any:
    model = _load(files, progress, encodes)
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
    for name, _ in list(model.named_children()):
        if name in _ENCODERS and not encodes:
            delattr(model, name)
    return model.to(device)


def _snac(files: CodecFiles, device: torch.device) -> Decode:
    """Load SNAC, whose weights are in a file of safetensors or in torch's own, which is read without running code."""
    try:
        decoder = SnacDecoder(files.config).to(device).eval()
        if (path := file_of(files.source, "model.safetensors")) is not None:
            stored = load_file(path)
        elif (path := file_of(files.source, "pytorch_model.bin")) is not None:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        else:
            raise ModelRefused(SNAC, "the codec has neither model.safetensors nor pytorch_model.bin: copy it again")
        decoder.load_state_dict(plain_weights(stored))
    except ModelRefused:
        raise
    except (*LOAD_ERRORS, pickle.UnpicklingError) as error:
        raise ModelRefused(SNAC, broken_file(files.source) or first_line(error)) from error
    return decoder.decode


def _load(files: CodecFiles, progress: Progress, encodes: bool) -> Any:
    name = _CLASSES[files.kind]
    auto: Any = getattr(importlib.import_module("transformers"), name)
    config = read_config(files.source)
    try:
        with reported_weights(progress):
            model, info = auto.from_pretrained(
                files.source, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except LOAD_ERRORS as error:
        raise ModelRefused(name, broken_file(files.source) or first_line(error)) from error
    missing = sorted(key for key in info["missing_keys"] if encodes or key.partition(".")[0] not in _ENCODERS)
    if missing:
        raise ModelRefused(name, f"the codec lacks {len(missing)} of its weights, such as {missing[0]}")
    return model.eval()
