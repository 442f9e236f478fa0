"""`python -m model_worker --run-dir DIR --index I --device cpu --epoch E`.

Started by the supervisor, one per device.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from interfaces import WorkerHello
from shared import logs, phases
from shared.endpoints import RunDirectory
from shared.liveness import become
from shared.settings import Settings, parse_memory

if TYPE_CHECKING:
    from model_worker.engine import Engine

BLOCK_SIZE = 16
CANNOT_WORK = 78
"""Exit code (EX_CONFIG of sysexits.h) when a restart would not help."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model_worker", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epoch", type=int, default=0)
    arguments = parser.parse_args()
    run_directory = RunDirectory(arguments.run_dir)
    role = f"model_worker:{arguments.index}"
    become(f"{role} {arguments.device}")
    settings = Settings.read(run_directory.settings_file)
    logs.configure(f"{role} {arguments.device}", settings.log_level)
    try:
        engine, hello = build(settings, arguments.index, arguments.device, arguments.epoch)
    except ValueError as error:
        phases.fatal(str(error))
        sys.exit(CANNOT_WORK)
    serve(engine, hello, run_directory)


def build(settings: Settings, index: int, device: str, epoch: int) -> tuple[Engine, WorkerHello]:
    """Loads the model and makes room for its KV cache. ValueError says why this model cannot be served here."""
    phases.phase("import")
    # torch takes over a second to import: only now, so that the supervisor sees the phase.
    import torch

    from model_worker.engine import Engine, WorkerIdentity
    from model_worker.kv_cache import default_kv_memory
    from model_worker.loader import load_model
    from model_worker.rows import WorkerRows
    from model_worker.runner import ModelRunner
    from model_worker.sampler import SamplerRows

    phases.phase("load weights")
    loaded = load_model(
        settings.model,
        settings.dtype,
        device,
        lambda _what, done, total: _progress(done, total),
        max_model_len=settings.max_model_len,
    )
    phases.phase("allocate KV")
    layout = loaded.attention.layout
    memory = parse_memory(settings.kv_memory) or default_kv_memory(loaded.device)
    wanted = settings.max_model_len or loaded.max_position or sys.maxsize
    useful = -(-wanted // BLOCK_SIZE) * settings.max_running
    num_blocks = min(layout.blocks_for(memory, BLOCK_SIZE), useful)
    max_model_len = min(wanted, loaded.max_position or wanted, num_blocks * BLOCK_SIZE)
    check_length(settings, loaded.max_position, num_blocks * BLOCK_SIZE)
    runner = ModelRunner(loaded, num_blocks, BLOCK_SIZE)
    phases.phase("compile kernels")
    sampler = SamplerRows(settings.max_running, loaded.vocab_size, loaded.device)
    runner.warm_up()
    sampler.warm_up()
    rows = WorkerRows(settings.max_running, max_model_len, BLOCK_SIZE, num_blocks)
    engine = Engine(runner.forward, rows, sampler, loaded.device, WorkerIdentity(index, epoch))
    hello = WorkerHello(
        device=device,
        index=index,
        epoch=epoch,
        pid=os.getpid(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_rows=settings.max_running,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention=runner.backend_name,
    )
    torch.set_grad_enabled(False)
    return engine, hello


def check_length(settings: Settings, max_position: int | None, capacity: int) -> None:
    """Refuses a `max_model_len` that the model or the KV memory cannot hold."""
    wanted = settings.max_model_len
    if wanted is None:
        return
    if max_position is not None and wanted > max_position:
        raise ValueError(f"max_model_len must be at most the model's {max_position} positions, got {wanted}")
    if wanted > capacity:
        raise ValueError(
            f"max_model_len {wanted} does not fit the KV memory, which holds {capacity} tokens; raise kv_memory"
        )


def serve(engine: Engine, hello: WorkerHello, run_directory: RunDirectory) -> None:
    """Announces the worker and runs steps until SIGTERM."""
    from model_worker.loop import Loop

    loop = Loop(engine, hello, run_directory)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    # Weights and modules live as long as the process: the collector need not look at them again.
    gc.collect()
    gc.freeze()
    phases.ready(blocks=hello.num_blocks, max_model_len=hello.max_model_len, attention=hello.attention)
    loop.run()


def _progress(done: int, total: int) -> None:
    phases.progress(done, total, "tensors")


if __name__ == "__main__":
    main()
