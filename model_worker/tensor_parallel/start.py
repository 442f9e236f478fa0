"""Makes a group of ranks one worker: how rank 0 leads it, and the work of every other rank.

Knows settings and the order in which the ranks start. Does not know requests.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from model_worker.attention import cpu
from model_worker.model import LoadedModel, Progress
from model_worker.runner import ModelRunner
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.links import Follower, Leader, Place
from model_worker.tensor_parallel.load import load_part
from model_worker.tensor_parallel.passes import GroupBackend, follow
from shared import forkserver, phases
from shared.model_facts import model_facts
from shared.settings import Settings

log = logging.getLogger(__name__)

# Types of models whose tokens, in groups, the tests compare with those of one process.
_PROVEN = {"llama", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe"}
# Bytes of a slot of the exchange: a piece of a larger tensor stays in a core's cache.
_SLOT_BYTES = 1 << 20
# Share of the least time that a step may take, after which a rank that is awaited is named and given up: before the
# scheduler gives up the worker.
_PATIENCE = 0.6
# Ends the passes of the start.
_STARTED = b""
# Seconds for which a rank waits for a message before it says that it lives.
_IDLE_SECONDS = 1.0
# Seconds for which a rank that ends because of another one stays.
_LAST_SECONDS = 1.0


class Group:
    """Rank 0's side: the part of the model that it computes, and the lines to the other ranks."""

    def __init__(self, settings: Settings, folder: Path, index: int, epoch: int) -> None:
        """Wait for the other ranks."""
        self._settings = settings
        self._ranks = settings.tensor_parallel
        self._leader = Leader(_place(settings, folder, index, 0, epoch), _SLOT_BYTES)

    def load(self, progress: Progress) -> LoadedModel:
        """Load this rank's part of the model, while the others load theirs."""
        loaded = load_part(
            self._settings.model,
            self._settings.dtype,
            self._ranks,
            self._leader.exchange,
            progress,
            self._settings.max_model_len,
        )
        log.info(
            "%s is computed by %d ranks with transformers' modules: the fused stack is not used in a group",
            loaded.architecture,
            self._ranks,
        )
        if loaded.model.config.model_type not in _PROVEN:
            log.warning(
                "%s is split as transformers plans it, which was not compared with one process for this architecture",
                loaded.architecture,
            )
        return loaded

    def lead(self, runner: ModelRunner) -> None:
        """Have the others compute each batch of the runner's, too. Returns when all have computed the first ones."""
        size = runner.cache.block_size
        self._leader.send(json.dumps({"num_blocks": runner.num_blocks, "block_size": size}).encode())
        runner.backend = GroupBackend(runner.backend, size, self._leader)
        runner.warm_up()
        self._leader.send(_STARTED)
        self._leader.exchange.patience = _patience(self._settings)

    def trouble(self) -> str:
        """Say which rank has ended; empty if none has."""
        return self._leader.trouble()


class Rank:
    """A rank other than 0: its part of the model, and the line to rank 0."""

    def __init__(self, settings: Settings, folder: Path, index: int, epoch: int, rank: int) -> None:
        """Load the part. Raises ValueError or OSError for a model that cannot be served."""
        self._rank = rank
        self._patience = _patience(settings)
        phases.phase("meet rank 0")
        self._link = Follower(_place(settings, folder, index, rank, epoch))
        phases.phase("load weights")
        self._loaded = load_part(
            settings.model,
            settings.dtype,
            settings.tensor_parallel,
            self._link.exchange,
            phases.tensors,
            settings.max_model_len,
        )

    def run(self) -> None:
        """Compute what rank 0 computes, until it ends."""
        terminated: list[int] = []
        # Rank 0 ends its step first, and its end is this one's.
        signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
        try:
            phases.phase("allocate KV")
            terms = json.loads(_next(self._link))
            runner = ModelRunner(self._loaded, terms["num_blocks"], terms["block_size"])
            torch.set_grad_enabled(False)
            phases.phase("compile kernels")
            cpu.warm_up(runner.cache.layout.dtype)
            follow(runner.backend, lambda: _next(self._link))
            self._link.exchange.patience = self._patience
            # The start has left it off; weights and modules live as long as the process, so it need not visit them.
            gc.collect()
            gc.freeze()
            gc.enable()
            forkserver.has_served()
            phases.ready(rank=self._rank)
            follow(runner.backend, lambda: _next(self._link))
        except GroupLost as error:
            if terminated:
                return
            log.error("rank %d ends: %s", self._rank, error)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # The supervisor sees the end of the rank that was lost first, and names that.
            time.sleep(_LAST_SECONDS)
            sys.exit(1)


def _next(link: Follower) -> bytes:
    """Wait for a message, and say meanwhile that this rank lives."""
    while True:
        phases.beat()
        message = link.receive(_IDLE_SECONDS)
        if message is not None:
            return message


def _patience(settings: Settings) -> float:
    return max(1.0, _PATIENCE * settings.stall_timeout)


def _place(settings: Settings, folder: Path, index: int, rank: int, epoch: int) -> Place:
    terms: dict[str, Any] = {
        **model_facts(settings),
        "dtype": settings.dtype,
        "tensor_parallel": settings.tensor_parallel,
        "max_model_len": settings.max_model_len,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    path = folder / f"group-{index}.sock"
    return Place(path, rank, settings.tensor_parallel, epoch, {name: str(value) for name, value in terms.items()})
