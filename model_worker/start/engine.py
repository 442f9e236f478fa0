"""Starts the worker of a model that generates: it is loaded, gets memory for K and V, and is described.

Knows settings and the order of a start. Does not know requests.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from interfaces import NO_IMAGES, WorkerHello
from model_worker import step_limits
from model_worker.beside import Beside
from model_worker.capacity import Capacity, capacity_for
from model_worker.cpu import kernel_cache
from model_worker.drafters import chosen
from model_worker.engine import Engine
from model_worker.execution import executors_for
from model_worker.execution.base import DeviceStep, WorkerIdentity
from model_worker.execution.kv_memory import CacheMemory, kv_memory
from model_worker.grammar import apply_mask
from model_worker.hearing.rules import rules_processor
from model_worker.keeper.kept_weights import KeptWeights
from model_worker.loading import draft as draft_loading
from model_worker.loading.draft import Guesser, load_guesser
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from model_worker.sampling.registry import load_processors, schemas
from model_worker.sampling.sampler import SamplerRows
from model_worker.speech.speaking_engine import with_codec
from model_worker.speech.token_order import order_processor
from model_worker.start.device_step import make_device_step, ship, spill
from model_worker.start.place import Place
from model_worker.start.serve import Served
from model_worker.weights.start import load_version, served_version, weights_commands
from shared import phases
from shared.model_facts import model_facts
from shared.setting_forms import devices_of_ranks
from shared.settings import Settings
from shared.speech_tokens import SpeechTokenFiles

if TYPE_CHECKING:
    from model_worker.tensor_parallel.start import Group

log = logging.getLogger(__name__)


def build_engine(
    settings: Settings,
    place: Place,
    weights_file: Path | None = None,
    group: Group | None = None,
    kept: KeptWeights | None = None,
) -> Served:
    """Load the model and make room for its KV cache. ValueError says why this model cannot be served here.

    Where compiled kernels are missing, their compilation has begun. The file names the version of the weights that is
    served, if that is not the model's own. In a `group` this is its first rank. `kept` is what a keeper has of the
    weights, if there is one.
    """
    processors = load_processors(settings.processor_entries)
    phases.phase("load weights")
    version = served_version(weights_file, settings.model)
    if group is None:
        loaded = load_version(settings, place.device, kernel_cache.are_compiled, phases.tensors, version, kept)
    else:
        loaded = group.load(phases.tensors)
    if loaded.clip_tokens:
        processors = {**processors, **rules_processor()}
    if SpeechTokenFiles.read(settings.model) is not None:
        processors = {**processors, **order_processor()}
    guesser = _load_guesser(settings, loaded)
    phases.phase("allocate KV")
    memory = _memory(settings, loaded, place.models, group)
    capacity = _capacity(settings, loaded, guesser, memory.kv_cache)
    runner = _runner(settings, loaded, capacity)
    steps = capacity.max_rows, capacity.max_model_len, step_limits.most_tokens(settings, loaded.device)
    # Before a group's backend takes its place.
    described = runner.description
    if group is not None:
        group.lead(runner, steps)
    if guesser is not None:
        guesser.check_length(capacity.max_model_len)
    phases.phase("compile kernels")
    sampler = SamplerRows(capacity.max_rows, loaded.vocab_size, loaded.device, processors, loaded.has_kernels)
    runner.warm_up()
    runner.record(*steps)
    identity = WorkerIdentity(place.index, place.epoch)
    shared = make_device_step(settings, runner, capacity, sampler, identity, memory.adapters)
    spill(settings, runner, shared)
    if group is None and loaded.recurrent is None:
        ship(runner, shared, place.local)
    compilation = _compile(sampler, loaded)
    engine = _engine(settings, shared, guesser, capacity.num_blocks)
    hello = replace(
        _hello(settings, place.device, shared, runner, capacity),
        backend=described,
        processors=schemas(processors),
        weights=version.number,
    )
    _use_few_threads(loaded)
    # The ranks of a group would have to change their weights together.
    weights = None if group is not None else weights_commands(settings, place.device, shared, runner, hello, version)
    speaking, hello, clips = with_codec(
        engine, hello, settings.model, place.local, phases.tensors, settings.voice_clips
    )
    beside = Beside(engine.encoding, engine.adapters, weights, engine.moves, engine.shipper, clips)
    return Served(speaking, hello, compilation, beside)


def _load_guesser(settings: Settings, loaded: LoadedModel) -> Guesser | None:
    """Load the model or head that guesses, if the settings name one. ValueError says why it cannot be used."""
    name = chosen.model_named(settings.draft) if settings.most_guesses else None
    if name is None or not loaded.row_invariant:
        return None
    phases.phase("load draft model")
    return load_guesser(name, settings.model, loaded, phases.tensors, kernel_cache.are_compiled)


def _memory(settings: Settings, loaded: LoadedModel, workers: int, group: Group | None) -> CacheMemory:
    """Return the memory of this worker, or in a group of each rank, for K and V."""
    of_rank = None if group is None else group.kv_memory(loaded, workers)
    return kv_memory(settings, loaded, workers) if of_rank is None else CacheMemory(of_rank)


def _capacity(settings: Settings, loaded: LoadedModel, guesser: Guesser | None, memory: int) -> Capacity:
    """Return how many blocks and rows fit the bytes for K and V."""
    most_rows = step_limits.most_rows(settings, loaded.device)
    if guesser is not None:
        memory = draft_loading.share_of(memory, loaded, guesser, most_rows)
    return capacity_for(loaded, memory, settings.max_model_len, most_rows, loaded.block_size)


def _runner(settings: Settings, loaded: LoadedModel, capacity: Capacity) -> ModelRunner:
    runner = ModelRunner(loaded, capacity.num_blocks, loaded.block_size, max_rows=capacity.max_rows)
    if runner.cache.states is not None:
        size = runner.cache.states.num_bytes / 1e6
        log.info("recurrent states of %d sequences take %.1f MB", capacity.max_rows, size)
    most = step_limits.most_tokens(settings, loaded.device)
    log.info("a step takes up to %d tokens, and %d sequences run together", most, capacity.max_rows)
    return runner


def _compile(sampler: SamplerRows, loaded: LoadedModel) -> kernel_cache.Compilation | None:
    """Compile the kernels of sampling on a CPU, or load them. Begin with the model's, where they are missing."""
    if loaded.has_kernels:
        sampler.warm_up(loaded.dtype)
        for dtype in {torch.float32, loaded.dtype}:
            apply_mask.warm_up(dtype)
    if loaded.has_kernels and not loaded.awaits_kernels:
        return None
    return kernel_cache.Compilation(loaded.dtype, loaded.kernel_family)


def _use_few_threads(loaded: LoadedModel) -> None:
    torch.set_grad_enabled(False)
    if loaded.clip_tokens and loaded.device.type == "cpu":
        # Products and attention have cores of their own. What torch does of a step is so small that it would wait for
        # another core, which encodes a clip, many times as long as it takes.
        torch.set_num_threads(1)


def _engine(settings: Settings, shared: DeviceStep, guesser: Guesser | None, num_blocks: int) -> Engine:
    """Make the engine, with the drafters that the settings name."""

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
