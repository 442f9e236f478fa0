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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from model_worker.agreement import Agreed
from model_worker.attention import cpu
from model_worker.cuda.memory import CudaMemory
from model_worker.execution.rehearsal import gpu_kv_memory
from model_worker.model import LoadedModel, Progress
from model_worker.runner import ModelRunner
from model_worker.tensor_parallel.collectives import Collectives
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.links import Follower, Leader, Place
from model_worker.tensor_parallel.load import agreement, load_part
from model_worker.tensor_parallel.passes import GroupBackend, follow
from shared import forkserver, phases
from shared.model_facts import model_facts
from shared.setting_checks import parse_memory
from shared.setting_forms import running_rows, step_tokens
from shared.settings import Settings

log = logging.getLogger(__name__)

# Types of models whose tokens, in groups, the tests compare with those of one process.
_PROVEN = {"llama", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "gpt_oss"}
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

    def __init__(self, settings: Settings, folder: Path, index: int, epoch: int, device: str) -> None:
        """Wait for the other ranks."""
        self._settings = settings
        self._ranks = settings.tensor_parallel
        self._device = _device(device)
        place = _place(settings, folder, index, 0, epoch)
        _meeting(place).unlink(missing_ok=True)
        self._leader = Leader(place, _SLOT_BYTES)
        self._collectives = _collectives(place, self._device)
        self._agreed = agreement(self._leader.exchange, self._ranks)

    def load(self, progress: Progress) -> LoadedModel:
        """Load this rank's part of the model, while the others load theirs."""
        loaded = load_part(
            self._settings.model,
            self._settings.dtype,
            self._ranks,
            self._collectives or self._leader.exchange,
            progress,
            self._settings.max_model_len,
            self._device,
            self._agreed,
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

    def kv_memory(self, loaded: LoadedModel, workers: int) -> int | None:
        """Return the bytes for a rank's part of K and V on GPUs that so many workers share; None on a CPU."""
        if self._collectives is None:
            return None
        return self._collectives.least(_rank_memory(self._settings, loaded, workers))

    def lead(self, runner: ModelRunner, record: tuple[int, int, int]) -> None:
        """Have the others compute each batch of the runner's, too. Returns when all have computed the first ones.

        On GPUs all record steps with these arguments of `ModelRunner.record`, in the same order.
        """
        size = runner.cache.block_size
        terms = {"num_blocks": runner.num_blocks, "block_size": size, "record": record}
        self._leader.send(json.dumps(terms).encode())
        if self._collectives is not None:
            _record(runner, record, self._agreed)
        runner.backend = GroupBackend(runner.backend, size, self._leader, self._collectives)
        runner.warm_up()
        self._leader.send(_STARTED)
        self._leader.exchange.patience = _patience(self._settings)

    def trouble(self) -> str:
        """Say which rank has ended; empty if none has."""
        return self._leader.trouble()


class Rank:
    """A rank other than 0: its part of the model, and the line to rank 0."""

    def __init__(
        self, settings: Settings, folder: Path, index: int, epoch: int, rank: int, device: str, workers: int
    ) -> None:
        """Load the part, and compute the first passes with it.

        Raises ValueError or OSError for a model that cannot be served, and torch's errors for a want of memory.
        """
        self._rank = rank
        self._patience = _patience(settings)
        phases.phase("meet rank 0")
        place = _place(settings, folder, index, rank, epoch)
        torch_device = _device(device)
        self._link = Follower(place)
        agreed = agreement(self._link.exchange, settings.tensor_parallel)
        self._collectives = _collectives(place, torch_device)
        phases.phase("load weights")
        loaded = load_part(
            settings.model,
            settings.dtype,
            settings.tensor_parallel,
            self._collectives or self._link.exchange,
            phases.tensors,
            settings.max_model_len,
            torch_device,
            agreed,
        )
        phases.phase("allocate KV")
        if self._collectives is not None:
            # The passes by which the first rank learns what is left are passes of all.
            self._collectives.least(_rank_memory(settings, loaded, workers))
        terms = json.loads(_next(self._link))
        runner = ModelRunner(loaded, terms["num_blocks"], terms["block_size"])
        torch.set_grad_enabled(False)
        phases.phase("compile kernels")
        if self._collectives is None:
            cpu.warm_up(runner.cache.layout.dtype)
        else:
            _record(runner, terms["record"], agreed)
        self._backend = runner.backend
        follow(self._backend, lambda: _next(self._link), self._collectives)

    def run(self) -> None:
        """Compute what rank 0 computes, until it ends."""
        terminated: list[int] = []
        # Rank 0 ends its step first, and its end is this one's.
        signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
        try:
            self._link.exchange.patience = self._patience
            # The start has left it off; weights and modules live as long as the process, so it need not visit them.
            gc.collect()
            gc.freeze()
            gc.enable()
            forkserver.has_served()
            phases.ready(rank=self._rank)
            follow(self._backend, lambda: _next(self._link), self._collectives)
        except GroupLost as error:
            if terminated:
                return
            log.error("rank %d ends: %s", self._rank, error)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # The supervisor sees the end of the rank that was lost first, and names that.
            time.sleep(_LAST_SECONDS)
            sys.exit(1)


def _record(runner: ModelRunner, record: Sequence[int], agreed: Agreed) -> None:
    """Record steps, on all ranks or on none: a recorded step has padding, so its sums have other shapes."""
    # NCCL wants a first use before a recording.
    runner.warm_up()
    max_rows, max_model_len, max_tokens = record
    runner.record(max_rows, max_model_len, max_tokens, agreed)


def _next(link: Follower) -> bytes:
    """Wait for a message, and say meanwhile that this rank lives."""
    while True:
        phases.beat()
        message = link.receive(_IDLE_SECONDS)
        if message is not None:
            return message


def _rank_memory(settings: Settings, loaded: LoadedModel, workers: int) -> int:
    """Return the bytes for K and V of one rank on a GPU: its share of the setting, or what steps and workers leave."""
    wanted = parse_memory(settings.kv_memory)
    if wanted is not None:
        return wanted // settings.tensor_parallel
    most_tokens = step_tokens(settings.max_batch_tokens, settings.devices)
    limits = most_tokens, running_rows(settings.max_running, settings.devices), settings.max_model_len
    return gpu_kv_memory(loaded, CudaMemory(loaded.device), workers, *limits).kv_cache


def _device(name: str) -> torch.device:
    """Return a rank's device, which is the current one from now on."""
    device = torch.device(name)
    if device.type == "cuda":
        # Streams and graphs are made on the current device, and kernels are launched there.
        torch.cuda.set_device(device)
    return device


def _meeting(place: Place) -> Path:
    """Return the file at which torch.distributed meets, in a folder that is this user's."""
    return place.path.with_suffix(f".{place.epoch}.meeting")


def _collectives(place: Place, device: torch.device) -> Collectives | None:
    """Return what joins tensors on GPUs, once all ranks are there; None on a CPU, whose ranks share memory."""
    return None if device.type == "cpu" else Collectives(place.rank, place.ranks, device, _meeting(place))


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
