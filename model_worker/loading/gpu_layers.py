"""Computes a model's layers on a GPU in few launches, if that gives the logits that its modules give.

Proven against transformers' own forward pass, and then against the modules with the same attention: a prompt that is
longer than the window, a prompt beside it, a decode step behind both, and a recorded one.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.attention.triton import missing
from model_worker.backends.fused_layers import FusedLayers
from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import CudaRecorder
from model_worker.decoder_form import UnsupportedPattern
from model_worker.loading import verify
from model_worker.model import LoadedModel, ModelRefused, first_line
from model_worker.runner import ModelRunner

log = logging.getLogger(__name__)

# The window that is tried where a model's is longer, so that it cuts.
_LONGEST_WINDOW = 40
_SHORT = 5
_BEHIND_WINDOW = 3


def fuse_layers(loaded: LoadedModel, tokens: Tensor, expected: Tensor) -> LoadedModel:
    """Return the model with its layers in few launches where that is proven; else as it is, and log the reason."""
    reason = missing()
    level = logging.INFO
    if loaded.attention_name == "reference":
        reason = "it attends in plain torch"
    try:
        if reason is None:
            fused = replace(loaded, layers=FusedLayers(loaded))
            verify.check_paged(fused, tokens, expected, fused.attention_name, fused.block_size)
            check_steps(fused)
            _give_back(loaded.device)
            return fused
    except torch.OutOfMemoryError:
        raise
    except UnsupportedPattern as unlike:
        reason = str(unlike)
    except Exception as error:  # compilers and drivers have errors of their own
        reason = first_line(error)
        level = logging.WARNING
    _give_back(loaded.device)
    said = "%s is served by transformers' modules, not by fused layers, since %s"
    log.log(level, said, loaded.architecture, reason)
    return loaded


def _give_back(device: torch.device) -> None:
    """Give back the memory that weights have left which lie together now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check_steps(fused: LoadedModel) -> None:
    """Compare fused layers with the modules, with the same attention. ModelRefused says where they differ."""
    attention = fused.attention
    windows = [params.sliding_window for params in attention.params if params.sliding_window]
    shortened = [
        replace(params, sliding_window=params.sliding_window and min(params.sliding_window, _LONGEST_WINDOW))
        for params in attention.params
    ]
    fused = replace(fused, attention=replace(attention, params=tuple(shortened)))
    most = min([_LONGEST_WINDOW, *windows]) + _BEHIND_WINDOW
    longest = min(most, (fused.max_position or most) - 1)
    size = fused.block_size
    width = -(-(longest + 1) // size)
    runners = [ModelRunner(one, 2 * width, size, fused.attention_name) for one in (fused, replace(fused, layers=None))]
    lengths = np.array([longest, min(_SHORT, longest)])
    tables = np.arange(2 * width)[::-1].reshape(2, width)
    draws = np.random.default_rng(0)

    def step(queries: NDArray[np.int64], lengths: NDArray[np.int64]) -> ForwardBatch:
        count = int(queries.sum())
        tokens = draws.integers(0, fused.vocab_size, count)
        return ForwardBatch.build(tokens, queries, lengths, tables, size, np.arange(count), fused.device)

    for kind, batch in (("prompts", step(lengths, lengths)), ("a decode step", step(np.ones(2, int), lengths + 1))):
        got, want = (runner.backend.logits(batch) for runner in runners)
        error = verify.median_error(got, want)
        if not error < verify.TOLERANCE[fused.dtype]:
            raise ModelRefused(
                fused.architecture, f"fused layers give other logits for {kind} (relative error {error:.2g})"
            )
    if fused.device.type == "cuda":
        eager = got.clone()
        if not torch.equal(CudaRecorder()(lambda: runners[0].backend.logits(batch))(), eager):
            raise ModelRefused(fused.architecture, "a recorded step of fused layers gives other logits")
