"""Makes the runner of a worker that paints, and its hello, from the settings."""

from __future__ import annotations

import os

import torch

from interfaces import Handover, WorkerHello
from model_worker.model import Progress
from model_worker.pixels.load import load_painter
from model_worker.pixels.runner import PixelRunner
from shared.model_facts import model_facts
from shared.settings import Settings


def build_pixels(
    settings: Settings, index: int, device: str, epoch: int, local: bool, progress: Progress
) -> tuple[PixelRunner, WorkerHello]:
    """Load a pipeline. ValueError says why it cannot be served here.

    `local`: the scheduler is on this host, so that images may go through shared memory.
    """
    painter = load_painter(
        settings.model, settings.dtype, device, settings.quantization, progress, settings.adapter_paths
    )
    torch.set_grad_enabled(False)
    hello = WorkerHello(
        device=device,
        index=index,
        epoch=epoch,
        pid=os.getpid(),
        num_blocks=0,
        block_size=0,
        max_rows=0,
        max_model_len=painter.max_model_len,
        vocab_size=painter.vocab_size,
        architecture=painter.architecture,
        dtype=painter.dtype,
        attention="",
        backend=painter.backend,
        tasks=sorted(painter.tasks),
        facts=model_facts(settings),
    )
    return PixelRunner(painter, index, epoch, Handover() if local else None), hello
