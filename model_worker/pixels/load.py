"""Loads a pipeline of diffusers, or refuses it with the reason.

Knows the files. Does not know who asks for images.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from model_worker.loading.checkpoint import check_device
from model_worker.loading.weights import reported_weights
from model_worker.model import ModelRefused, Progress, first_line
from model_worker.pixels.adapters import PixelAdapters
from model_worker.pixels.families import FAMILIES
from model_worker.pixels.painter import Painter
from shared.pixel_files import PixelFiles

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Modules that are not loaded: what they do is no part of an image.
_LEFT_OUT = ("safety_checker", "feature_extractor", "image_encoder")


def load_painter(
    source: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    quantization: str = "none",
    progress: Progress = lambda _what, _done, _total: None,
    adapters: Mapping[str, str] | None = None,
) -> Painter:
    """Load a directory or hub name that has model_index.json, and the folders of adapters by their names. ValueError
    says why it cannot be served."""
    target = torch.device(device)
    check_device(target)
    if quantization != "none":
        raise ValueError(f"quantization must be none for a model that paints, got {quantization!r}")
    wanted = _dtype(dtype, target)
    files = PixelFiles.read(source)
    pipe = _load(files, wanted, progress)
    loaded = PixelAdapters(pipe)
    loaded.load(adapters or {}, files.kind)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(False).to(target)
    return Painter(
        family=FAMILIES[files.kind](pipe, target),
        adapters=loaded,
        architecture=files.kind,
        max_model_len=files.longest_prompt,
        vocab_size=len(pipe.tokenizer),
        multiple=files.multiple,
    )


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type to compute in: with auto float32 on a CPU, whose half types are slow, and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "float16" and device.type == "cpu":
        raise ValueError("dtype must be auto, float32 or bfloat16 for a model that paints on a CPU, got 'float16'")
    return _DTYPES[name]


def _load(files: PixelFiles, dtype: torch.dtype, progress: Progress) -> Any:
    """Read the pipeline. ModelRefused when diffusers cannot."""
    with _without_warnings():
        diffusers = _diffusers()
    diffusers.utils.logging.disable_progress_bar()
    left_out: dict[str, Any] = {name: None for name, kind in files.index.items() if _is_absent(name, kind)}
    if "requires_safety_checker" in files.index:
        left_out["requires_safety_checker"] = False
    try:
        with _without_warnings(), reported_weights(progress):
            pipe = getattr(diffusers, files.kind).from_pretrained(
                files.source, dtype=dtype, use_safetensors=True, **left_out
            )
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        raise ModelRefused(files.kind, first_line(error)) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out what only authors of checkpoints can change, and that torchvision is missing, which is not used."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(level)


def _is_absent(name: str, kind: Any) -> bool:
    """Whether an entry of model_index.json is a module that is not loaded, or that the pipeline does not have."""
    return isinstance(kind, list) and (name in _LEFT_OUT or kind[0] is None)


def _diffusers() -> Any:
    """Import diffusers. ValueError names the extra that brings it."""
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise ValueError(
            f"a model that paints needs the package diffusers ({error}): pip install 'tokenyard[pixels]'"
        ) from error
