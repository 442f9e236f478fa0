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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from model_worker.agreement import Agreed
from model_worker.attention import cpu
from model_worker.execution.kv_memory import kv_memory
from model_worker.model import LoadedModel, Progress
from model_worker.runner import ModelRunner
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.links import Follower, Leader, Place
from model_worker.tensor_parallel.load import load_part
from model_worker.tensor_parallel.network import NetworkFollower, NetworkLeader, NetworkPlace
from model_worker.tensor_parallel.passes import GroupBackend, follow
from model_worker.tensor_parallel.ties import follow_here, follow_hosts, lead_here, lead_hosts
from shared import forkserver, phases
from shared.model_facts import model_facts
from shared.settings import Settings

log = logging.getLogger(__name__)

# Types of models whose tokens, in groups, the tests compare with those of one process.
_PROVEN = {"llama", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "gpt_oss"}
# Further settings that ranks share whose settings come from several hosts.
_OF_ALL_HOSTS = ("kv_memory", "max_running", "max_batch_tokens", "stall_timeout")
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

    def __init__(
        self, settings: Settings, folder: Path, index: int, epoch: int, device: str, rendezvous: str = ""
    ) -> None:
        """Wait for the other ranks: at HOST:PORT of the rendezvous, or on this host.

        GroupLost names those that do not come, and ValueError says that the rendezvous is not on this host.
        """
        self._settings = settings
        self._ranks = settings.tensor_parallel
        self._device = _device(device)
        self._leader: Leader | NetworkLeader
        if rendezvous:
            self._leader, self._ties = lead_hosts(_network_place(settings, rendezvous, 0, self._device), self._device)
        else:
            self._leader, self._ties = lead_here(_place(settings, folder, index, 0, epoch), self._device)

    def load(self, progress: Progress) -> LoadedModel:
        """Load this rank's part of the model, while the others load theirs."""
        loaded = load_part(
            self._settings.model,
            self._settings.dtype,
            self._ranks,
            self._ties.joining,
            progress,
            self._settings.max_model_len,
            self._device,
            self._ties.agreed,
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
        """Return the bytes for a rank's part of K and V on devices that so many workers share, as each rank has them.

        None for the CPUs of one host.
        """
        if self._ties.apart is None:
            return None
        return self._ties.apart.least(kv_memory(self._settings, loaded, workers).kv_cache)

    def lead(self, runner: ModelRunner, record: tuple[int, int, int]) -> None:
        """Have the others compute each batch of the runner's, too. Returns when all have computed the first ones.

        On GPUs all record steps with these arguments of `ModelRunner.record`, in the same order.
        """
        size = runner.cache.block_size
        terms = {"num_blocks": runner.num_blocks, "block_size": size, "record": record}
        self._leader.send(json.dumps(terms).encode())
        if self._ties.giving is not None:
            _record(runner, record, self._ties.agreed)
        runner.backend = GroupBackend(runner.backend, size, self._leader, self._ties.giving, self._ties.steps)
        runner.warm_up()
        self._leader.send(_STARTED)
        self._ties.serve(self._leader, _patience(self._settings))

    def trouble(self) -> GroupLost | None:
        """Say which rank has ended; None if none has."""
        return self._ties.trouble()

    @contextmanager
    def telling_its_end(self) -> Iterator[None]:
        """Tell ranks on other hosts when this context ends, and why."""
        try:
            yield
        except SystemExit:
            self._ties.finish("it cannot go on, and its log says why")
            raise
        except Exception as error:
            self._ties.finish(f"{type(error).__name__}: {error}", blamed=True)
            raise
        self._ties.finish()


class Rank:
    """A rank other than 0: its part of the model, and the line to rank 0."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        index: int,
        epoch: int,
        rank: int,
        device: str,
        workers: int,
        rendezvous: str = "",
    ) -> None:
        """Load the part, and compute the first passes with it. Rank 0 is at HOST:PORT, or else on this host.

        Raises ValueError or OSError for a model that cannot be served, and for settings that are not those of rank 0;
        torch's errors for a want of memory.
        """
        self._rank = rank
        self._patience = _patience(settings)
        phases.phase("meet rank 0")
        torch_device = _device(device)
        self._link: Follower | NetworkFollower
        self._terminated = False
        self._serves = False
        if rendezvous:
            place = _network_place(settings, rendezvous, rank, torch_device)
            self._link, self._ties = follow_hosts(place, torch_device)
        else:
            self._link, self._ties = follow_here(_place(settings, folder, index, rank, epoch), torch_device)
        phases.phase("load weights")
        loaded = load_part(
            settings.model,
            settings.dtype,
            settings.tensor_parallel,
            self._ties.joining,
            phases.tensors,
            settings.max_model_len,
            torch_device,
            self._ties.agreed,
        )
        phases.phase("allocate KV")
        if self._ties.apart is not None:
            # The passes by which the first rank learns what is left are passes of all.
            self._ties.apart.least(kv_memory(settings, loaded, workers).kv_cache)
        terms = json.loads(self._next())
        runner = ModelRunner(loaded, terms["num_blocks"], terms["block_size"])
        torch.set_grad_enabled(False)
        phases.phase("compile kernels")
        if self._ties.giving is None:
            cpu.warm_up(runner.cache.layout.dtype)
        else:
            _record(runner, terms["record"], self._ties.agreed)
        self._backend = runner.backend
        follow(self._backend, self._next, self._ties.giving, self._ties.steps)

    def run(self) -> None:
        """Compute what rank 0 computes, until it ends."""
        # Rank 0 ends its step first, and its end is this one's.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._ties.serve(self._link, self._patience)
            # The start has left it off; weights and modules live as long as the process, so it need not visit them.
            gc.collect()
            gc.freeze()
            gc.enable()
            forkserver.has_served()
            phases.ready(rank=self._rank)
            self._serves = True
            follow(self._backend, self._next, self._ties.giving, self._ties.steps)
        except GroupLost as error:
            self._ties.finish(str(error), error.blamed)
            if self._terminated:
                return
            log.error("rank %d ends: %s", self._rank, error)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # The supervisor sees the end of the rank that was lost first, and names that.
            time.sleep(_LAST_SECONDS)
            sys.exit(1)
        except Exception as error:
            # By itself, and what it computed may be the reason.
            self._ties.finish(f"{type(error).__name__}: {error}", blamed=True)
            raise

    def _next(self) -> bytes:
        """Wait for a message; a rank that serves says meanwhile that it lives. GroupLost where another rank is lost."""
        while True:
            if self._serves:
                phases.beat()
            message = self._link.receive(_IDLE_SECONDS)
            if message is not None:
                return message
            if (lost := self._ties.trouble()) is not None:
                raise lost

    def _on_sigterm(self, *_: Any) -> None:
        # Rank 0 may have sent batches that it waits for. It ends when it hears of this, and if not, the supervisor ends
        # this rank in its time.
        self._terminated = True
        self._ties.leave()


def _record(runner: ModelRunner, record: Sequence[int], agreed: Agreed) -> None:
    """Record steps, on all ranks or on none: a recorded step has padding, so its sums have other shapes."""
    # NCCL wants a first use before a recording.
    runner.warm_up()
    max_rows, max_model_len, max_tokens = record
    runner.record(max_rows, max_model_len, max_tokens, agreed)


def _device(name: str) -> torch.device:
    """Return a rank's device, which is the current one from now on."""
    device = torch.device(name)
    if device.type == "cuda":
        # Streams and graphs are made on the current device, and kernels are launched there.
        torch.cuda.set_device(device)
    return device


def _patience(settings: Settings) -> float:
    return max(1.0, _PATIENCE * settings.stall_timeout)


def _place(settings: Settings, folder: Path, index: int, rank: int, epoch: int) -> Place:
    path = folder / f"group-{index}.sock"
    return Place(path, rank, settings.tensor_parallel, epoch, _terms(settings))


def _network_place(settings: Settings, rendezvous: str, rank: int, device: torch.device) -> NetworkPlace:
    """Return a rank's place. Hosts of other kinds round otherwise, and might choose another expert for a token."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    terms = _terms(settings) | {name: str(getattr(settings, name)) for name in _OF_ALL_HOSTS} | {"kind of device": kind}
    return NetworkPlace(rendezvous, rank, settings.tensor_parallel, Path(settings.curve_keys), terms)


def _terms(settings: Settings) -> dict[str, str]:
    """Return the settings that all ranks must share, by name."""
    terms: dict[str, Any] = {
        **model_facts(settings),
        "dtype": settings.dtype,
        "tensor_parallel": settings.tensor_parallel,
        "max_model_len": settings.max_model_len,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {name: str(value) for name, value in terms.items()}
