"""`python -m model_worker --run-dir DIR --index I --device cpu --epoch E`.

Started by the supervisor, one per device.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from interfaces import NO_IMAGES, Handover, WorkerHello
from shared import forkserver, logs, phases
from shared.endpoints import RunDirectory
from shared.liveness import become
from shared.load_errors import may_pass
from shared.pooling_files import PoolingFiles
from shared.settings import Settings, parse_memory

if TYPE_CHECKING:
    from model_worker.adapter_loads import AdapterLoads
    from model_worker.cpu import kernel_cache
    from model_worker.engine import Engine
    from model_worker.loop import Runner
    from model_worker.model import LoadedModel
    from model_worker.one_shot import TextRunner
    from model_worker.sampling.sampler import SamplerRows
    from model_worker.vision.encode_queue import EncodeQueue
    from model_worker.vision.rows import ImageRows
    from model_worker.weights.commands import WeightsCommands

log = logging.getLogger(__name__)

# Time after which a thread gives the interpreter to another that waits for it.
SWITCH_SECONDS = 1e-4
# Exit code (EX_CONFIG of sysexits.h) of a process that has reported why it cannot work.
CANNOT_WORK = 78


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model_worker", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--models", type=int, default=1, help="number of models whose workers share the device")
    parser.add_argument("--connect", default="", help="tcp endpoint of a scheduler on another machine")
    arguments = parser.parse_args()
    run_directory = RunDirectory(arguments.run_dir)
    role = f"model_worker:{arguments.index}"
    become(f"{role} {arguments.device}", run_directory.stack_file(role))
    settings = Settings.read(run_directory.settings_file)
    logs.configure(f"{role} {arguments.device}", settings.log_level, settings.log_format)
    phases.phase("import")
    _import()
    keys = Path(settings.curve_keys) if arguments.connect else None
    endpoint = arguments.connect or run_directory.worker_endpoint
    epoch = forkserver.successor(arguments.epoch)
    become(f"{role} {arguments.device}", run_directory.stack_file(role))
    try:
        if pools(settings):
            local = not arguments.connect
            runner, described, compilation = build_texts(settings, arguments.index, arguments.device, epoch, local)
            worker = partial(serve, runner, described, endpoint, keys, compilation)
        else:
            file = None if arguments.connect else run_directory.weights_file
            built = build(settings, arguments.index, arguments.device, epoch, arguments.models, file)
            engine, hello, compilation, weights = built
            beside = engine.encoding, engine.adapters, weights
            worker = partial(serve, engine, hello, endpoint, keys, compilation, *beside)
    except (ValueError, OSError) as error:
        phases.fatal(str(error), may_pass(error))
        sys.exit(CANNOT_WORK)
    worker()


def pools(settings: Settings) -> bool:
    """Whether the model makes values of texts instead of generating. ValueError for a checkpoint without usable files.

    The setting decides, and without it the checkpoint.
    """
    task = settings.task
    return (PoolingFiles.read(settings.model).task if task == "auto" else task) != "generate"


def _import() -> None:
    """Import everything slow before forking. Must not start threads, which a fork would miss."""
    # Imports make a million objects and hardly any garbage; looking for that takes a second.
    gc.disable()
    from model_worker import capacity, engine, rows, runner
    from model_worker.cpu import kernel_cache
    from model_worker.grammar import mask_process, masks
    from model_worker.loading import checkpoint
    from model_worker.sampling import processors, sampler

    assert all((capacity, engine, kernel_cache, checkpoint, mask_process, masks, processors, rows, runner, sampler))
    gc.freeze()


def build(
    settings: Settings, index: int, device: str, epoch: int, models: int = 1, weights_file: Path | None = None
) -> tuple[Engine, WorkerHello, kernel_cache.Compilation | None, WeightsCommands]:
    """Load the model and make room for its KV cache. ValueError says why this model cannot be served here.

    Where compiled kernels are missing, their compilation has begun. The workers of so many `models` share the device.
    The file names the version of the weights that is served, if that is not the model's own.
    """
    import torch

    from model_worker.adapter_loads import AdapterLoads, default_adapter_memory
    from model_worker.capacity import capacity_for
    from model_worker.cpu import kernel_cache
    from model_worker.drafters import chosen
    from model_worker.drafters.draft_model import DraftModel
    from model_worker.engine import Engine
    from model_worker.execution import executors_for
    from model_worker.execution.base import DeviceStep, WorkerIdentity
    from model_worker.grammar import mask_process
    from model_worker.grammar.masks import Masks
    from model_worker.kv_cache import default_kv_memory
    from model_worker.loading import draft as draft_loading
    from model_worker.rows import WorkerRows
    from model_worker.runner import ModelRunner
    from model_worker.sampling.registry import load_processors, schemas
    from model_worker.sampling.sampler import SamplerRows
    from model_worker.vision.encoder import EncoderCache
    from model_worker.vision.rows import ImageRows
    from model_worker.weights.start import load_version, served_version, weights_commands

    processors = load_processors(settings.processor_entries)
    phases.phase("load weights")
    version = served_version(weights_file, settings.model)
    loaded = load_version(settings, device, kernel_cache.are_compiled, _progress, version)
    draft = _load_draft(settings, loaded)
    phases.phase("allocate KV")
    memory = parse_memory(settings.kv_memory) or default_kv_memory(loaded.device, models)
    if draft is not None:
        memory = draft_loading.share_of(memory, loaded, draft)
    capacity = capacity_for(loaded, memory, settings.max_model_len, settings.max_running, loaded.block_size)
    runner = ModelRunner(loaded, capacity.num_blocks, loaded.block_size)
    guessing = None if draft is None else ModelRunner(draft, capacity.num_blocks, loaded.block_size)
    if draft is not None:
        draft_loading.check_length(draft, capacity.max_model_len)
    phases.phase("compile kernels")
    sampler = SamplerRows(settings.max_running, loaded.vocab_size, loaded.device, processors, loaded.has_kernels)
    runner.warm_up()
    if guessing is not None:
        guessing.warm_up()
    runner.record_decode(settings.max_running, capacity.max_model_len)
    rows = WorkerRows(settings.max_running, capacity.max_model_len, loaded.block_size, capacity.num_blocks)
    fork_server = mask_process.fork_server(settings.model, settings.max_running)
    masks = Masks(fork_server, settings.max_running, loaded.vocab_size, has_kernels=loaded.has_kernels)
    compilation = None
    if loaded.has_kernels:
        _warm_up(sampler, loaded)
    else:
        _say_that_kernels_come()
        compilation = kernel_cache.Compilation(loaded.dtype, loaded.kernel_family)
    images = None if loaded.encoder is None else ImageRows(loaded.encoder, EncoderCache(loaded.encoder.cache_bytes))
    shared = DeviceStep(rows, sampler, runner.backend, WorkerIdentity(index, epoch), masks, images)
    if images is not None:
        shared.encoding = _encode_queue(images)
    if runner.backend.takes_adapters:
        memory = parse_memory(settings.lora_memory, "lora_memory") or default_adapter_memory(loaded.device)
        shared.adapters = AdapterLoads(runner.backend, epoch, index, memory)
    overlaps = loaded.device.type == "cuda" or runner.backend.overlaps
    overlap = loaded.device.type if overlaps else "off"
    executors = executors_for(
        shared,
        overlap,
        settings.most_guesses,
        learns=settings.speculate == "auto",
        drafters=chosen.without_models(settings.draft),
        models=[] if guessing is None else [DraftModel(guessing.backend, rows, sampler)],
    )
    if settings.most_guesses and shared.drafters is None:
        log.info("nothing is guessed: the bits of a row depend on its neighbours here (docs/speculation.md)")
    engine = Engine(shared, executors)
    hello = WorkerHello(
        device=device,
        index=index,
        epoch=epoch,
        pid=os.getpid(),
        num_blocks=capacity.num_blocks,
        block_size=loaded.block_size,
        max_rows=settings.max_running,
        max_model_len=capacity.max_model_len,
        vocab_size=loaded.vocab_size,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention=runner.attention_name,
        hidden_size=loaded.hidden_size,
        backend=runner.description,
        row_invariant=runner.backend.row_invariant,
        guesses=shared.drafters is not None,
        images=NO_IMAGES if loaded.encoder is None else int(loaded.encoder.family.sight),
        adapter_memory=0 if shared.adapters is None else shared.adapters.memory,
        processors=schemas(processors),
        weights=version.number,
    )
    torch.set_grad_enabled(False)
    weights = weights_commands(settings, device, shared, runner, hello, version)
    return engine, hello, compilation, weights


def _encode_queue(images: ImageRows) -> EncodeQueue:
    """An image is encoded with half of the cores. Steps have the others meanwhile."""
    import torch

    from model_worker.cpu.threads import ALL_THREADS, ThreadPool
    from model_worker.vision.encode_queue import EncodeQueue

    cores = torch.get_num_threads()
    encoding = max(1, cores // 2)

    def share_cores(sharing: bool) -> None:
        ThreadPool.most_threads = max(1, cores - encoding) if sharing else ALL_THREADS

    return EncodeQueue(images, encoding, share_cores)


def _load_draft(settings: Settings, loaded: LoadedModel) -> LoadedModel | None:
    """Load the model that guesses, if the settings name one. ValueError says why it cannot be used."""
    from model_worker.cpu import kernel_cache
    from model_worker.drafters import chosen
    from model_worker.loading.draft import load_draft

    name = chosen.model_named(settings.draft) if settings.most_guesses else None
    if name is None or not loaded.row_invariant:
        return None
    phases.phase("load draft model")
    return load_draft(name, settings.model, loaded, _progress, kernel_cache.are_compiled)


def build_texts(
    settings: Settings, index: int, device: str, epoch: int, local: bool
) -> tuple[TextRunner, WorkerHello, kernel_cache.Compilation | None]:
    """Load a model of a one-shot task, which has no KV cache. ValueError says why it cannot be served here.

    `local`: the scheduler is on this host, so that large values may go through shared memory. Where compiled kernels
    are missing, their compilation has begun.
    """
    import torch

    from model_worker.cpu import kernel_cache
    from model_worker.one_shot import TextRunner
    from model_worker.pooling.load import load_pooling

    phases.phase("load weights")
    model = load_pooling(
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
    compilation = None
    if model.waits_for_kernels:
        _say_that_kernels_come()
        compilation = kernel_cache.Compilation(model.weights, kernel_cache.ENCODER)
    torch.set_grad_enabled(False)
    hello = WorkerHello(
        device=device,
        index=index,
        epoch=epoch,
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
    )
    return TextRunner(model, index, epoch, Handover() if local else None), hello, compilation


def _say_that_kernels_come() -> None:
    log.info("kernels are being compiled, once for this machine: until then answers are slow (about a minute)")


def _warm_up(sampler: SamplerRows, loaded: LoadedModel) -> None:
    """Compile the kernels of sampling on a CPU, or load them from the cache."""
    import torch

    from model_worker.grammar import apply_mask

    sampler.warm_up()
    for dtype in {torch.float32, loaded.dtype}:
        apply_mask.warm_up(dtype)


def serve(
    engine: Runner,
    hello: WorkerHello,
    endpoint: str,
    keys: Path | None = None,
    compilation: kernel_cache.Compilation | None = None,
    encoding: EncodeQueue | None = None,
    adapters: AdapterLoads | None = None,
    weights: WeightsCommands | None = None,
) -> None:
    """Register the worker and run steps or batches until SIGTERM, or until a successor can use compiled kernels."""
    from model_worker.loop import Loop

    def superseded() -> bool:
        return compilation is not None and compilation.done

    loop = Loop(engine, hello, endpoint, keys, superseded, encoding, adapters, weights)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    # A thread that has done its part of a pass goes on to the next one as soon as it has the interpreter.
    sys.setswitchinterval(SWITCH_SECONDS)
    # Weights and modules live as long as the process, so the collector need not visit them.
    gc.collect()
    gc.freeze()
    gc.enable()
    forkserver.has_served()
    phases.ready(blocks=hello.num_blocks, max_model_len=hello.max_model_len, attention=hello.attention)
    loop.run()
    if compilation is not None and compilation.done:
        log.info("the kernels are compiled: a worker that uses them takes over")
        phases.leave("leaves to a worker with compiled kernels")


def _report(what: str, done: int, total: int) -> None:
    """Report the progress of a load, in which kernels are a phase of their own."""
    if what == "compile kernels":
        phases.phase(what)
    else:
        _progress(what, done, total)


def _progress(_: str, done: int, total: int) -> None:
    phases.progress(done, total, "tensors")


if __name__ == "__main__":
    main()
