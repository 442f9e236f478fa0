"""Loads what guesses for a model, a smaller one or an EAGLE-3 head, or refuses it with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from model_worker.drafters.base import ModelDrafter
from model_worker.drafters.draft_model import DraftModel
from model_worker.drafters.eagle3 import Eagle3, bytes_of_features
from model_worker.drafters.eagle3_head import Eagle3Head
from model_worker.execution.base import DeviceStep
from model_worker.kv_cache import KVCache, KVLayout
from model_worker.loading.checkpoint import read_config
from model_worker.loading.eagle3 import is_head, load_head, refused_by_name
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, Progress
from model_worker.recurrent.families import is_recurrent
from model_worker.runner import ModelRunner
from shared.gguf.format import is_gguf
from shared.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


class Guesser(Protocol):
    """What was loaded, and takes as many KV blocks as the model for which it guesses."""

    @property
    def layout(self) -> KVLayout:
        """The shape of its K and V."""
        ...

    def bytes_of_rows(self, rows: int) -> int:
        """Return the most bytes that it keeps of so many rows, beside its K and V."""
        ...

    def check_length(self, max_model_len: int) -> None:
        """ValueError if it cannot read sequences as long as are served."""
        ...

    def drafter(self, shared: DeviceStep, num_blocks: int) -> ModelDrafter:
        """Make the drafter of a worker."""
        ...


class DraftModelGuesser:
    """A smaller model of the same tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    @property
    def layout(self) -> KVLayout:
        return self._loaded.attention.layout

    def bytes_of_rows(self, rows: int) -> int:
        return 0

    def check_length(self, max_model_len: int) -> None:
        longest = self._loaded.max_position
        if longest is not None and longest < max_model_len:
            raise ValueError(
                f"draft: its model was made for {longest} positions, and sequences of {max_model_len} tokens are "
                f"served: set max_model_len to {longest}, or leave the model out"
            )

    def drafter(self, shared: DeviceStep, num_blocks: int) -> DraftModel:
        runner = ModelRunner(self._loaded, num_blocks, shared.rows.block_size)
        runner.warm_up()
        return DraftModel(runner.backend, shared.rows, shared.sampler)


class HeadGuesser:
    """An EAGLE-3 head. It reads as many of the last tokens as it is given, so no text is too long."""

    def __init__(self, head: Eagle3Head, source: str) -> None:
        """`source` is the directory or hub name of the head."""
        self._head = head
        self._source = source

    @property
    def layout(self) -> KVLayout:
        return self._head.layout

    def bytes_of_rows(self, rows: int) -> int:
        return bytes_of_features(self._head, rows)

    def check_length(self, max_model_len: int) -> None:
        """All lengths will do."""

    def drafter(self, shared: DeviceStep, num_blocks: int) -> Eagle3:
        cache = KVCache(self._head.layout, num_blocks, shared.rows.block_size, shared.backend.device)
        drafter = Eagle3(self._head, cache, shared.rows, shared.sampler, lambda: shared.backend.ends)
        with refused_by_name(self._source):
            drafter.warm_up()
        shared.watch(self._head.form.layers, drafter.observe)
        return drafter


def load_guesser(
    source: str,
    model: str,
    loaded: LoadedModel,
    progress: Progress,
    has_kernels: Callable[[torch.dtype, str], bool] = lambda *_: True,
) -> Guesser:
    """Load what the directory or hub name has, to guess for `model`, which is `loaded`. ValueError says why not.

    It computes in the same type, so that both use the same kernels.
    """
    if is_head(source):
        return HeadGuesser(load_head(source, loaded, has_kernels), source)
    if load_tokenizer(source).get_vocab() != load_tokenizer(model).get_vocab():
        raise ValueError(
            f"draft: the model {source} has other tokens than {model}, so it cannot guess them: name a smaller model "
            "of the same family, or leave it out"
        )
    _refuse_states(source)
    dtype = str(loaded.dtype).removeprefix("torch.")
    device = str(loaded.device)
    return DraftModelGuesser(load_model(source, dtype, device, progress, has_kernels=has_kernels, vision=False))


def _refuse_states(source: str) -> None:
    """Refuse a model with recurrent layers, before its weights are read. GGUF files of such are refused by their kind.

    ValueError.
    """
    if is_gguf(source):
        return
    config = read_config(source)
    if is_recurrent(config):
        name = (config.architectures or [config.model_type])[0]
        raise ValueError(
            f"draft: {name} has recurrent states, which cannot take wrong guesses back: name a model with attention "
            "alone, or leave it out"
        )


def share_of(memory: int, loaded: LoadedModel, guesser: Guesser, rows: int) -> int:
    """Return the bytes of KV memory that are left for the model beside what guesses.

    That has as many blocks, and perhaps keeps something of each of so many rows. ValueError if this leaves nothing.
    """
    kept = guesser.bytes_of_rows(rows)
    if kept >= memory:
        raise ValueError(
            f"draft: what the EAGLE-3 head keeps of {rows} rows takes {_mebibytes(kept)}, and the KV memory is "
            f"{_mebibytes(memory)}: raise kv_memory, lower max_running, or leave the head out"
        )
    if kept:
        log.info("the EAGLE-3 head may keep %s of %d rows, taken from the KV memory", _mebibytes(kept), rows)
    own = loaded.attention.layout.bytes_per_token
    return (memory - kept) * own // (own + guesser.layout.bytes_per_token)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
