"""`python -m model_worker --run-dir DIR --index I --device cpu --epoch E`.

Started by the supervisor, one per device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from interfaces import NO_IMAGES, WorkerHello
from model_worker import step_limits
from model_worker.start_texts import build_texts, pools, say_that_kernels_come
from shared import forkserver, logs, phases
from shared.endpoints import RunDirectory
from shared.liveness import become
from shared.load_errors import may_pass
from shared.model_facts import model_facts
from shared.setting_checks import parse_memory
from shared.setting_forms import bytes_of, devices_of_ranks
from shared.settings import Settings
from shared.speech_tokens import SpeechTokenFiles

if TYPE_CHECKING:
    from model_worker.adapter_loads import AdapterLoads
    from model_worker.capacity import Capacity
    from model_worker.cpu import kernel_cache
    from model_worker.engine import Engine
    from model_worker.execution.base import DeviceStep, WorkerIdentity
    from model_worker.keeper.kept_weights import KeptWeights
    from model_worker.kv_spill.mover import KvMover
    from model_worker.kv_spill.shipper import KvShipper
    from model_worker.loading.draft import Guesser
    from model_worker.loop import Runner
    from model_worker.model import LoadedModel
    from model_worker.runner import ModelRunner
    from model_worker.sampling.sampler import SamplerRows
    from model_worker.speech.clip_thread import ClipThread
    from model_worker.tensor_parallel.exchange import GroupLost
    from model_worker.tensor_parallel.start import Group
    from model_worker.vision.encode_queue import EncodeQueue
    from model_worker.weights.commands import WeightsCommands

log = logging.getLogger(__name__)

# Time after which a thread gives the interpreter to another that waits for it.
SWITCH_SECONDS = 1e-4
# Of a worker in the background: a tenth of a core that others want all the time.
_NICENESS = 10
# Exit code (EX_CONFIG of sysexits.h) of a process that has reported why it cannot work.
CANNOT_WORK = 78


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model_worker", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--models", type=int, default=1, help="number of workers that share the device")
    parser.add_argument("--background", action="store_true", help="leave the cores to other workers that want them")
    parser.add_argument("--rank", type=int, default=0, help="which rank of a group this is (tensor_parallel)")
    parser.add_argument("--rendezvous", default="", help="HOST:PORT of a group whose ranks are on several hosts")
    parser.add_argument("--keeper", action="store_true", help="a keeper has the weights, or is to have them")
    parser.add_argument("--connect", default="", help="tcp endpoint of a scheduler on another machine")
    arguments = parser.parse_args()
    run_directory = RunDirectory(arguments.run_dir)
    role = f"model_worker:{arguments.index if arguments.index >= 0 else 'remote'}"
    role += f".{arguments.rank}" if arguments.rank else ""
    become(f"{role} {arguments.device}", run_directory.stack_file(role))
    settings = Settings.read(run_directory.settings_file)
    logs.configure(f"{role} {arguments.device}", settings.log_level, settings.log_format)
    if arguments.background:
        _yield_cores()
    phases.phase("import")
    _import()
    from model_worker.speech.speaking_engine import with_codec
    from model_worker.tensor_parallel.exchange import GroupLost, NotMet

    keys = Path(settings.curve_keys) if arguments.connect else None
    index_file = run_directory.index_file if arguments.connect else None
    endpoint = arguments.connect or run_directory.worker_endpoint
    epoch = forkserver.successor(arguments.epoch)
    become(f"{role} {arguments.device}", run_directory.stack_file(role))
    place = settings, run_directory.path, arguments.index, epoch
    own_device = devices_of_ranks(arguments.device, settings.tensor_parallel)[arguments.rank]
    kept = _kept_weights(run_directory, arguments.index, arguments.device) if arguments.keeper else None
    group: Group | None = None
    try:
        if arguments.rank:
            from model_worker.tensor_parallel.start import Rank

            worker: Callable[[], None] = Rank(
                *place, arguments.rank, own_device, arguments.models, arguments.rendezvous
            ).run
        elif pools(settings):
            local = not arguments.connect
            texts = build_texts(settings, arguments.index, arguments.device, epoch, local)
            runner, described, compilation, adapters = texts
            worker = partial(
                serve, runner, described, endpoint, keys, compilation, adapters=adapters, index_file=index_file
            )
        else:
            file = None if arguments.connect else run_directory.weights_file
            group = _group(*place, own_device, arguments.rendezvous) if settings.tensor_parallel > 1 else None
            what = settings, arguments.index, arguments.device, epoch, arguments.models
            built = build(*what, file, group, not arguments.connect, kept)
            engine, hello, compilation, weights = built
            beside = engine.encoding, engine.adapters, weights
            speaking, hello, clips = with_codec(
                engine, hello, settings.model, not arguments.connect, phases.tensors, settings.voice_clips
            )
            trouble = None if group is None else group.trouble
            last = index_file, trouble, engine.moves
            worker = partial(
                serve, speaking, hello, endpoint, keys, compilation, *beside, *last, shipper=engine.shipper, clips=clips
            )
    except (ValueError, OSError) as error:
        phases.fatal(str(error), may_pass(error))
        sys.exit(CANNOT_WORK)
    except NotMet as missing:
        phases.missed(str(missing))
        sys.exit(1)
    except GroupLost as lost:
        log.error("this worker ends: %s", lost)
        sys.exit(1)
    except RuntimeError as error:
        phases.fatal(*_no_memory(own_device, error, 0 if kept is None else kept.size))
        sys.exit(CANNOT_WORK)
    with contextlib.nullcontext() if group is None else group.telling_its_end():
        worker()


def _yield_cores() -> None:
    """Let other workers go first. Kernels that make a group of each session compare groups before processes."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _kept_weights(run_directory: RunDirectory, index: int, device: str) -> KeptWeights:
    """Return what a keeper has of this worker's weights, which may be nothing."""
    from model_worker.keeper import cuda_pieces
    from model_worker.keeper.kept_weights import KeptWeights

    number = int(device.partition(":")[2] or 0)
    return KeptWeights(run_directory.keeper_socket(index), lambda: cuda_pieces.CudaPieces(number))


def _group(settings: Settings, folder: Path, index: int, epoch: int, device: str, rendezvous: str) -> Group:
    """Be rank 0 of a group: wait for the others."""
    from model_worker.tensor_parallel.start import Group

    return Group(settings, folder, index, epoch, device, rendezvous)


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
    settings: Settings,
    index: int,
    device: str,
    epoch: int,
    models: int = 1,
    weights_file: Path | None = None,
    group: Group | None = None,
    local: bool = True,
    kept: KeptWeights | None = None,
) -> tuple[Engine, WorkerHello, kernel_cache.Compilation | None, WeightsCommands | None]:
    """Load the model and make room for its KV cache. ValueError says why this model cannot be served here.

    Where compiled kernels are missing, their compilation has begun. The workers of so many `models` share the device.
    The file names the version of the weights that is served, if that is not the model's own. In a `group` this is its
    first rank. `local`: the scheduler is on this machine. `kept` is what a keeper has of the weights, if there is one.
    """
    import torch

    from model_worker.capacity import capacity_for
    from model_worker.cpu import kernel_cache
    from model_worker.execution.base import WorkerIdentity
    from model_worker.hearing.rules import rules_processor
    from model_worker.loading import draft as draft_loading
    from model_worker.runner import ModelRunner
    from model_worker.sampling.registry import load_processors, schemas
    from model_worker.sampling.sampler import SamplerRows
    from model_worker.speech.token_order import order_processor
    from model_worker.weights.start import load_version, served_version, weights_commands

    processors = load_processors(settings.processor_entries)
    phases.phase("load weights")
    version = served_version(weights_file, settings.model)
    if group is None:
        loaded = load_version(settings, device, kernel_cache.are_compiled, phases.tensors, version, kept)
    else:
        loaded = group.load(phases.tensors)
    if loaded.clip_tokens:
        processors = {**processors, **rules_processor()}
    if SpeechTokenFiles.read(settings.model) is not None:
        processors = {**processors, **order_processor()}
    guesser = _load_guesser(settings, loaded)
    most_rows = step_limits.most_rows(settings, loaded.device)
    phases.phase("allocate KV")
    memory, for_adapters = _kv_memory(settings, loaded, models, group)
    if guesser is not None:
        memory = draft_loading.share_of(memory, loaded, guesser, most_rows)
    capacity = capacity_for(loaded, memory, settings.max_model_len, most_rows, loaded.block_size)
    most_rows = capacity.max_rows
    runner = ModelRunner(loaded, capacity.num_blocks, loaded.block_size, max_rows=most_rows)
    if runner.cache.states is not None:
        log.info("recurrent states of %d sequences take %.1f MB", most_rows, runner.cache.states.num_bytes / 1e6)
    described = runner.description
    most = step_limits.most_tokens(settings, loaded.device)
    log.info("a step takes up to %d tokens, and %d sequences run together", most, most_rows)
    steps = most_rows, capacity.max_model_len, most
    if group is not None:
        group.lead(runner, steps)
    if guesser is not None:
        guesser.check_length(capacity.max_model_len)
    phases.phase("compile kernels")
    sampler = SamplerRows(most_rows, loaded.vocab_size, loaded.device, processors, loaded.has_kernels)
    runner.warm_up()
    runner.record(*steps)
    shared = _device_step(settings, loaded, runner, capacity, sampler, WorkerIdentity(index, epoch), for_adapters)
    _spill(settings, runner, shared)
    if group is None and loaded.recurrent is None:
        _ship(runner, shared, local)
    compilation = None
    if loaded.has_kernels:
        _warm_up(sampler, loaded)
    if loaded.awaits_kernels or not loaded.has_kernels:
        say_that_kernels_come()
        compilation = kernel_cache.Compilation(loaded.dtype, loaded.kernel_family)
    engine = _engine(settings, shared, guesser, capacity.num_blocks)
    hello = replace(
        _hello(settings, device, shared, runner, capacity),
        backend=described,
        processors=schemas(processors),
        weights=version.number,
    )
    torch.set_grad_enabled(False)
    if loaded.clip_tokens and loaded.device.type == "cpu":
        # Products and attention have cores of their own. What torch does of a step is so small that it would wait for
        # another core, which encodes a clip, many times as long as it takes.
        torch.set_num_threads(1)
    if group is not None:
        # Its ranks would have to change theirs together.
        return engine, hello, compilation, None
    return engine, hello, compilation, weights_commands(settings, device, shared, runner, hello, version)


def _kv_memory(
    settings: Settings, loaded: LoadedModel, workers: int, group: Group | None = None
) -> tuple[int, int | None]:
    """Return the bytes for the KV cache: those of the settings, or what `workers` on a device leave for each.

    In a group these are those of one rank. Also the bytes that were kept for adapters; None if none were.
    """
    from model_worker.cuda.memory import CudaMemory
    from model_worker.execution.rehearsal import AdapterWish, gpu_kv_memory
    from model_worker.kv_cache import default_kv_memory

    shared = None if group is None else group.kv_memory(loaded, workers)
    if shared is not None:
        return shared, None
    wanted = parse_memory(settings.kv_memory)
    # A decoder of speech takes no step without a clip.
    if wanted is not None or loaded.device.type != "cuda" or loaded.clip_tokens:
        return (wanted or default_kv_memory(loaded.device, workers)) // settings.tensor_parallel, None
    most = step_limits.most_tokens(settings, loaded.device), step_limits.most_rows(settings, loaded.device)
    for_adapters = parse_memory(settings.lora_memory, "lora_memory")
    has_adapters = bool(for_adapters or settings.lora or settings.lora_dirs)
    limits = *most, settings.max_model_len, AdapterWish(for_adapters) if has_adapters else None
    held = 0 if loaded.kept is None else loaded.kept.size
    plan = gpu_kv_memory(loaded, CudaMemory(loaded.device, held), workers, *limits)
    log.info("%s is served by %s", loaded.architecture, plan)
    return plan.kv_cache, plan.adapters or None


def _no_memory(device: str, error: RuntimeError, kept: int) -> tuple[str, bool]:
    """Say why a worker cannot start for want of a GPU's memory, and whether that may pass. Raises other errors.

    `kept` are the bytes of its weights that a keeper has.
    """
    import torch

    from model_worker.cuda.memory import CudaMemory, explain_no_memory, is_for_want_of_memory

    if not is_for_want_of_memory(error):
        raise error
    return explain_no_memory(CudaMemory(torch.device(device), kept), error)


def _hello(settings: Settings, device: str, shared: DeviceStep, runner: ModelRunner, capacity: Capacity) -> WorkerHello:
    """Say who this worker is, and what its model and its memory can do."""
    loaded = runner.loaded
    return WorkerHello(
        device="+".join(devices_of_ranks(device, settings.tensor_parallel)),
        index=shared.identity.index,
        epoch=shared.identity.epoch,
        pid=os.getpid(),
        num_blocks=capacity.num_blocks,
        block_size=loaded.block_size,
        max_rows=shared.rows.max_rows,
        step_tokens=step_limits.most_tokens(settings, loaded.device),
        max_model_len=capacity.max_model_len,
        vocab_size=loaded.vocab_size,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention=runner.attention_name,
        hidden_size=loaded.hidden_size,
        row_invariant=runner.backend.row_invariant,
        guesses=shared.drafters is not None,
        images=NO_IMAGES if loaded.encoder is None else int(loaded.encoder.family.sight),
        adapter_memory=0 if shared.adapters is None else shared.adapters.memory,
        facts=model_facts(settings),
        ranks=settings.tensor_parallel,
        spill_slots=0 if shared.moves is None else shared.moves.slots,
        spill_place="" if shared.moves is None else shared.moves.place.name,
        kv_form="" if shared.shipper is None else shared.shipper.form,
        block_bytes=0 if shared.shipper is None else shared.shipper.block_bytes,
        reuses_prefixes=loaded.recurrent is None,
    )


def _device_step(
    settings: Settings,
    loaded: LoadedModel,
    runner: ModelRunner,
    capacity: Capacity,
    sampler: SamplerRows,
    identity: WorkerIdentity,
    for_adapters: int | None,
) -> DeviceStep:
    """Make the rows of a worker, with masks, and with images and adapters where the model takes them.

    Memory was kept for_adapters where it is known how much they need.
    """
    from model_worker.adapter_loads import AdapterLoads, default_adapter_memory
    from model_worker.execution.base import DeviceStep
    from model_worker.execution.images import encode_queue, image_rows
    from model_worker.grammar import mask_process
    from model_worker.grammar.masks import Masks
    from model_worker.rows import WorkerRows

    most_rows = capacity.max_rows
    rows = WorkerRows(most_rows, capacity.max_model_len, loaded.block_size, capacity.num_blocks)
    fork_server = mask_process.fork_server(settings.model, most_rows)
    masks = Masks(fork_server, most_rows, loaded.vocab_size, has_kernels=loaded.has_kernels)
    images = image_rows(loaded)
    shared = DeviceStep(rows, sampler, runner.backend, identity, masks, images)
    if images is not None:
        shared.encoding = encode_queue(images)
    if runner.backend.takes_adapters:
        memory = parse_memory(settings.lora_memory, "lora_memory") or for_adapters
        memory = memory or default_adapter_memory(loaded.device)
        shared.adapters = AdapterLoads(runner.backend, identity.epoch, identity.index, memory)
    return shared


def _spill(settings: Settings, runner: ModelRunner, shared: DeviceStep) -> None:
    """Make a place for blocks beside the KV cache, if the settings ask for one."""
    from model_worker.kv_spill.start import kv_mover

    size = bytes_of(settings.kv_spill)
    if size and runner.loaded.recurrent is not None:
        log.info("kv_spill is ignored: a beginning cannot be reused without the recurrent state behind it")
    elif size:
        place = runner.cache, runner.num_blocks, runner.loaded.device
        identity = shared.identity
        shared.moves = kv_mover(*place, size, settings.kv_spill_dir, identity.epoch, identity.index)
        log.info("%d blocks of the KV cache may go to %s", shared.moves.slots, shared.moves.place.name)


def _ship(runner: ModelRunner, shared: DeviceStep, local: bool) -> None:
    """Make what sends the blocks of sequences to other workers, when this one is asked to end."""
    from model_worker.kv_spill.start import kv_shipper

    place = runner.cache, runner.num_blocks, runner.loaded.device
    shared.shipper = kv_shipper(*place, shared.identity.epoch, shared.identity.index, shares=local)


def _engine(settings: Settings, shared: DeviceStep, guesser: Guesser | None, num_blocks: int) -> Engine:
    """Make the engine, with the drafters that the settings name."""
    from model_worker.drafters import chosen
    from model_worker.engine import Engine
    from model_worker.execution import executors_for

    device = shared.backend.device.type
    executors = executors_for(
        shared,
        device if device == "cuda" or shared.backend.overlaps else "off",
        settings.most_guesses,
        learns=settings.speculate == "auto",
        drafters=chosen.without_models(settings.draft),
        models=[] if guesser is None else [guesser.drafter(shared, num_blocks)],
    )
    if settings.most_guesses and shared.drafters is None:
        log.info("nothing is guessed: the bits of a row depend on its neighbours here (docs/speculation.md)")
    return Engine(shared, executors)


def _load_guesser(settings: Settings, loaded: LoadedModel) -> Guesser | None:
    """Load the model or head that guesses, if the settings name one. ValueError says why it cannot be used."""
    from model_worker.cpu import kernel_cache
    from model_worker.drafters import chosen
    from model_worker.loading.draft import load_guesser

    name = chosen.model_named(settings.draft) if settings.most_guesses else None
    if name is None or not loaded.row_invariant:
        return None
    phases.phase("load draft model")
    return load_guesser(name, settings.model, loaded, phases.tensors, kernel_cache.are_compiled)


def _warm_up(sampler: SamplerRows, loaded: LoadedModel) -> None:
    """Compile the kernels of sampling on a CPU, or load them from the cache."""
    import torch

    from model_worker.grammar import apply_mask

    sampler.warm_up(loaded.dtype)
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
    index_file: Path | None = None,
    trouble: Callable[[], GroupLost | None] | None = None,
    moves: KvMover | None = None,
    shipper: KvShipper | None = None,
    clips: ClipThread | None = None,
) -> None:
    """Register the worker and run steps or batches until SIGTERM, or until a successor can use compiled kernels.

    At SIGTERM its sequences go to other workers first, as far as they take them.
    """
    from model_worker.loop import Loop
    from model_worker.scheduler_link import Refused
    from model_worker.tensor_parallel.exchange import GroupLost

    def superseded() -> bool:
        return compilation is not None and compilation.done

    beside = encoding, adapters, weights, index_file, trouble, moves, shipper, clips
    loop = Loop(engine, hello, endpoint, keys, superseded, *beside)
    signal.signal(signal.SIGTERM, lambda *_: loop.leave())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    # A thread that has done its part of a pass goes on to the next one as soon as it has the interpreter.
    sys.setswitchinterval(SWITCH_SECONDS)
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
    elif compilation is not None and compilation.done:
        log.info("the kernels are compiled: a worker that uses them takes over")
        phases.leave("leaves to a worker with compiled kernels")


if __name__ == "__main__":
    main()
