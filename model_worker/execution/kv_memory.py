"""How much memory the KV cache of a process gets. Knows settings, the model that is loaded, and what its steps take."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from model_worker import step_limits
from model_worker.cuda.memory import CudaMemory
from model_worker.execution.rehearsal import AdapterWish, gpu_kv_memory
from model_worker.kv_cache import default_kv_memory
from model_worker.model import LoadedModel
from shared.setting_checks import parse_memory
from shared.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheMemory:
    """The bytes for the KV cache, and those that are kept for adapters; None if none are."""

    kv_cache: int
    adapters: int | None = None


def kv_memory(settings: Settings, loaded: LoadedModel, workers: int) -> CacheMemory:
    """Return what the settings say, or what `workers` on a device leave for each.

    In a group these are the bytes of one rank, and none are kept for adapters.
    """
    wanted = parse_memory(settings.kv_memory)
    # A decoder of speech takes no step without a clip.
    if wanted is not None or loaded.device.type != "cuda" or loaded.clip_tokens:
        return CacheMemory((wanted or default_kv_memory(loaded.device, workers)) // settings.tensor_parallel)
    most = step_limits.most_tokens(settings, loaded.device), step_limits.most_rows(settings, loaded.device)
    for_adapters = parse_memory(settings.lora_memory, "lora_memory")
    has_adapters = settings.tensor_parallel == 1 and bool(for_adapters or settings.lora or settings.lora_dirs)
    limits = *most, settings.max_model_len, AdapterWish(for_adapters) if has_adapters else None
    held = 0 if loaded.kept is None else loaded.kept.size
    plan = gpu_kv_memory(loaded, CudaMemory(loaded.device, held), workers, *limits)
    log.info("%s is served by %s", loaded.architecture, plan)
    return CacheMemory(plan.kv_cache, plan.adapters or None)
