"""Loads a checkpoint of VITS or MMS, or refuses it with the reason.

Knows the files. Does not know who asks for the sound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn.utils import parametrize
from transformers import VitsModel

from interfaces import PoolingTask, SynthesisContext
from model_worker.loading.checkpoint import check_device, read_config
from model_worker.loading.weights import open_checkpoint, reported_weights
from model_worker.model import ModelRefused, Progress, first_line
from model_worker.speech.vits import TooLong, VitsSpeaker
from shared.load_errors import broken_file
from shared.speech_files import SpeechFiles

# Most tokens of a sentence: its attention takes memory with their square.
LONGEST_SENTENCE = 1024


def load_speech(
    source: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    quantization: str = "none",
    max_model_len: int | None = None,
    progress: Progress = lambda _what, _done, _total: None,
) -> VitsSpeaker:
    """Load a Hugging Face directory or hub name that speaks. ValueError says why it cannot be served."""
    target = torch.device(device)
    check_device(target)
    if dtype not in ("auto", "float32"):
        raise ValueError(f"dtype must be auto or float32 for a model that speaks, got {dtype!r}")
    if quantization != "none":
        raise ValueError(f"quantization must be none for a model that speaks, got {quantization!r}")
    if max_model_len is not None and max_model_len > LONGEST_SENTENCE:
        raise ValueError(
            f"max_model_len must be at most {LONGEST_SENTENCE} for a model that speaks, got {max_model_len}"
        )
    SpeechFiles.read(source)
    model = _load(source, progress)
    _bake_norms(model)
    # It serves training alone.
    del model.posterior_encoder
    model.to(target)
    speaker = VitsSpeaker(
        model=model,
        architecture=type(model).__name__,
        device=target,
        max_model_len=max_model_len or LONGEST_SENTENCE,
        vocab_size=int(model.config.vocab_size),
        speakers=max(1, int(model.config.num_speakers)),
    )
    _prove(speaker)
    return speaker


def _load(source: str | Path, progress: Progress) -> Any:
    config = read_config(source)
    architecture = str((config.architectures or [config.model_type])[0])
    open_checkpoint(source, config, architecture)
    auto: Any = VitsModel
    try:
        with reported_weights(progress):
            model, info = auto.from_pretrained(
                source, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelRefused(architecture, broken_file(str(source)) or first_line(error)) from error
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("posterior_encoder."))
    if missing:
        raise ModelRefused(architecture, f"the checkpoint lacks {len(missing)} of its weights, such as {missing[0]}")
    return model.eval()


def _bake_norms(model: Any) -> None:
    """Compute the normalised weights once, instead of in each pass."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")


def _prove(speaker: VitsSpeaker) -> None:
    """Speak a few tokens. ModelRefused when that fails."""
    probe = SynthesisContext.of([[0, 1 % speaker.vocab_size, 0]], PoolingTask.SPEAK, seeds=np.zeros(1, np.int64))
    try:
        speaker.run(probe)
    except TooLong:
        return
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelRefused(speaker.architecture, f"a pass over three tokens fails: {first_line(error)}") from error
