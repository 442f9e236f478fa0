"""Starts the worker of a one-shot task: its model is loaded, and described to the scheduler."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch

from interfaces import Handover, WorkerHello
from model_worker.adapter_loads import AdapterLoads, default_adapter_memory
from model_worker.beside import Beside
from model_worker.cpu import kernel_cache
from model_worker.one_shot import TextRunner
from model_worker.start.place import Place
from model_worker.start.serve import Served
from shared import phases
from shared.model_facts import model_facts
from shared.pooling_files import PoolingFiles
from shared.setting_checks import parse_memory
from shared.settings import Settings

if TYPE_CHECKING:
    from model_worker.pooling.pooler import Pooler
    from model_worker.speech.vits import VitsSpeaker


def is_one_shot(settings: Settings) -> bool:
    """Whether the model makes values of texts instead of generating. ValueError for a checkpoint without usable
    files."""
    return _task(settings) != "generate"


def _task(settings: Settings) -> str:
    """Return the member of pooling_files.TASKS that is served: the setting's, and without one the checkpoint's."""
    return PoolingFiles.read(settings.model).task if settings.task == "auto" else settings.task


def build_one_shot(settings: Settings, place: Place) -> Served:
    """Load a model of a one-shot task, or one that paints. Neither has a KV cache. ValueError says why it cannot be
    served here.

    Where compiled kernels are missing, their compilation has begun.
    """
    if settings.tensor_parallel > 1:
        raise ValueError(
            f"tensor_parallel {settings.tensor_parallel} is for models that generate, and this one serves the task "
            f"{_task(settings)}: leave it out"
        )
    phases.phase("load weights")
    if _task(settings) == "paint":
        from model_worker.pixels.start import build_pixels

        return Served(*build_pixels(settings, place.index, place.device, place.epoch, place.local, phases.tensors))
    model = _load_one_shot(settings, place.device)
    compilation = None
    if model.waits_for_kernels:
        compilation = kernel_cache.Compilation(model.weights, kernel_cache.ENCODER)
    torch.set_grad_enabled(False)
    adapters = _adapter_loads(settings, model, place)
    hello = WorkerHello(
        device=place.device,
        index=place.index,
        epoch=place.epoch,
        pid=os.getpid(),
        num_blocks=0,
        block_size=0,
        max_rows=0,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        architecture=model.architecture,
        dtype=model.dtype,
        attention="",
        hidden_size=model.hidden_size,
        backend=model.backend,
        tasks=sorted(model.tasks),
        labels=model.labels,
        adapter_memory=0 if adapters is None else adapters.memory,
        facts=model_facts(settings),
    )
    # On the scheduler's host large values may go through shared memory.
    runner = TextRunner(model, place.index, place.epoch, Handover() if place.local else None)
    return Served(runner, hello, compilation, Beside(adapters=adapters))


def _adapter_loads(settings: Settings, model: Pooler | VitsSpeaker, place: Place) -> AdapterLoads | None:
    """Make what reads the adapters of a model beside its batches; None for one that takes none."""
    from model_worker.pooling.pooler import Pooler

    if not isinstance(model, Pooler) or model.adapters is None:
        return None
    memory = parse_memory(settings.lora_memory, "lora_memory") or default_adapter_memory(model.device)
    return AdapterLoads(model.adapters, place.epoch, place.index, memory)


def _load_one_shot(settings: Settings, device: str) -> Pooler | VitsSpeaker:
    """Load the model of a one-shot task. ValueError says why it cannot be served."""
    from model_worker.pooling.load import load_pooling
    from model_worker.speech.load import load_speech

    if _task(settings) == "speak":
        return load_speech(
            settings.model, settings.dtype, device, settings.quantization, settings.max_model_len, phases.tensors
        )
    return load_pooling(
        settings.model,
        settings.dtype,
        device,
        settings.task,
        settings.quantization,
        settings.max_model_len,
        settings.max_batch_tokens,
        _report,
        partial(kernel_cache.are_compiled, family=kernel_cache.ENCODER),
    )


def _report(what: str, done: int, total: int) -> None:
    """Report the progress of a load, in which kernels are a phase of their own."""
    if what == "compile kernels":
        phases.phase(what)
    else:
        phases.tensors(what, done, total)
