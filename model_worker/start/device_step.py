"""The rows of a worker, and what their steps use: masks, images, adapters, and places for blocks of K and V."""

from __future__ import annotations

import logging

from model_worker.adapter_loads import AdapterLoads, default_adapter_memory
from model_worker.capacity import Capacity
from model_worker.execution.base import DeviceStep, WorkerIdentity
from model_worker.execution.images import encode_queue, image_rows
from model_worker.grammar import mask_process
from model_worker.grammar.masks import Masks
from model_worker.kv_spill.start import kv_mover, kv_shipper
from model_worker.rows import WorkerRows
from model_worker.runner import ModelRunner
from model_worker.sampling.sampler import SamplerRows
from shared.setting_checks import parse_memory
from shared.setting_forms import bytes_of
from shared.settings import Settings

log = logging.getLogger(__name__)


def make_device_step(
    settings: Settings,
    runner: ModelRunner,
    capacity: Capacity,
    sampler: SamplerRows,
    identity: WorkerIdentity,
    for_adapters: int | None,
) -> DeviceStep:
    """Make the rows of a worker, with masks, and with images and adapters where the model takes them.

    `for_adapters` are the bytes that were kept for these; None if it is not known how much they need.
    """
    loaded = runner.loaded
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


def spill(settings: Settings, runner: ModelRunner, shared: DeviceStep) -> None:
    """Make a place for blocks beside the KV cache, if the settings ask for one."""

    size = bytes_of(settings.kv_spill)
    if size and runner.loaded.recurrent is not None:
        log.info("kv_spill is ignored: a beginning cannot be reused without the recurrent state behind it")
    elif size:
        place = runner.cache, runner.num_blocks, runner.loaded.device
        identity = shared.identity
        shared.moves = kv_mover(*place, size, settings.kv_spill_dir, identity.epoch, identity.index)
        log.info("%d blocks of the KV cache may go to %s", shared.moves.slots, shared.moves.place.name)


def ship(runner: ModelRunner, shared: DeviceStep, local: bool) -> None:
    """Make what sends the blocks of sequences to other workers, when this one is asked to end."""

    place = runner.cache, runner.num_blocks, runner.loaded.device
    shared.shipper = kv_shipper(*place, shared.identity.epoch, shared.identity.index, shares=local)
