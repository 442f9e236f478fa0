"""Serves a model that has been started: registers the worker, and runs what the scheduler sends until it is to end."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from interfaces import WorkerHello
from model_worker.beside import NOTHING_BESIDE, Beside
from model_worker.cpu import kernel_cache
from model_worker.loop import Loop, Runner
from model_worker.scheduler_link import Refused
from model_worker.start.failures import CANNOT_WORK
from model_worker.tensor_parallel.exchange import GroupLost
from shared import forkserver, phases

log = logging.getLogger(__name__)

# Time after which a thread gives the interpreter to another that waits for it.
_SWITCH_SECONDS = 1e-4


@dataclass(frozen=True)
class Served:
    """A model that can be served, what works beside its steps, and its kernels that are still being compiled."""

    engine: Runner
    hello: WorkerHello
    compilation: kernel_cache.Compilation | None = None
    beside: Beside = NOTHING_BESIDE

    @property
    def superseded(self) -> bool:
        """Whether a worker that starts now would have compiled kernels, which this one lacks."""
        return self.compilation is not None and self.compilation.done


def serve(
    served: Served,
    endpoint: str,
    keys: Path | None = None,
    index_file: Path | None = None,
    trouble: Callable[[], GroupLost | None] | None = None,
) -> None:
    """Register the worker and run steps or batches until SIGTERM, or until a successor can use compiled kernels.

    At SIGTERM its sequences go to other workers first, as far as they take them.
    """
    hello = served.hello
    loop = Loop(served.engine, hello, endpoint, keys, lambda: served.superseded, served.beside, index_file, trouble)
    signal.signal(signal.SIGTERM, lambda *_: loop.leave())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    # A thread that has done its part of a pass goes on to the next one as soon as it has the interpreter.
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Weights and modules live as long as the process, so the collector need not visit them.
    gc.collect()
    gc.freeze()
    gc.enable()
    forkserver.has_served()
    phases.ready(blocks=hello.num_blocks, max_model_len=hello.max_model_len, attention=hello.attention)
    try:
        loop.run()
    except Refused as refusal:
        phases.fatal(str(refusal))
        sys.exit(CANNOT_WORK)
    except GroupLost as lost:
        log.error("this worker ends: %s", lost)
        sys.exit(1)
    if trouble is not None and not loop.leaves and (reason := trouble()):
        log.error("this worker ends: %s", reason)
        sys.exit(1)
    if loop.leaves:
        phases.leave("was asked to end")
    elif served.superseded:
        log.info("the kernels are compiled: a worker that uses them takes over")
        phases.leave("leaves to a worker with compiled kernels")
