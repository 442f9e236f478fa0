"""Which version of the weights a worker starts with, and how it gets others later."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import torch

from interfaces import WeightsVersion, WorkerHello
from model_worker.cpu import kernel_cache
from model_worker.execution.base import DeviceStep
from model_worker.host_memory import trim_heap
from model_worker.keeper.kept_weights import KeptWeights
from model_worker.loading.kept import Keeping, identity_of
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, Progress
from model_worker.runner import ModelRunner
from model_worker.weights.commands import WeightsCommands
from model_worker.weights.groups import Groups
from model_worker.weights.serving import ServedModel
from shared import phases
from shared.settings import Settings
from shared.weights_file import WeightsFile, stamp_of

# Most bytes that tensors may take that are sent at a time, as a multiple of the model's own.
_MOST_SENT = 2


def served_version(file: Path | None, model: str) -> WeightsVersion:
    """Return the version that the server serves. ValueError or OSError where its files are not what they were."""
    version = WeightsFile(file).read().version
    if not version.stamp:
        return version
    source = version.source or model
    try:
        problem = "" if stamp_of(source, version.overlays) == version.stamp else "have changed since they were read"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        # An error that may pass: others serve the version, and its files may come back.
        text = f"the version {version.name!r} of the weights is served, and its files in {source} {problem}: put them "
        raise OSError(errno.ESTALE, f"{text}back, or restart the server")
    return version


def load_version(
    settings: Settings,
    device: str,
    has_kernels: Callable[[torch.dtype, str], bool],
    progress: Progress,
    version: WeightsVersion,
    kept: KeptWeights | None = None,
) -> LoadedModel:
    """Load the model of the settings with the weights of a version, which may be `kept`, or will be."""
    source = version.source or settings.model
    keeping = None
    if kept is not None:
        making = settings.dtype, settings.max_model_len, settings.vision, settings.quantization
        keeping = Keeping(kept, identity_of(source, version.overlays, *making))
    loaded = load_model(
        source,
        settings.dtype,
        device,
        progress,
        max_model_len=settings.max_model_len,
        quantization=settings.quantization,
        has_kernels=has_kernels,
        vision=settings.vision,
        kv_dtype=settings.kv_dtype,
        overlays=[Path(one) for one in version.overlays],
        keeping=keeping,
    )
    trim_heap()
    return loaded


def weights_commands(
    settings: Settings,
    device: str,
    shared: DeviceStep,
    runner: ModelRunner,
    hello: WorkerHello,
    version: WeightsVersion,
) -> WeightsCommands:
    """Make what carries out commands about the weights of the model that a runner computes."""

    def load(source: str, overlays: list[Path]) -> LoadedModel:
        had, awaits = runner.loaded.has_kernels, runner.loaded.awaits_kernels
        wanted = WeightsVersion(0, "", source, [str(path) for path in overlays])

        def had_kernels(_: torch.dtype, family: str) -> bool:
            return had and (family == kernel_cache.DECODER or not awaits)

        return load_version(settings, device, had_kernels, _beat, wanted)

    def use(changed: ModelRunner) -> None:
        shared.change_backend(changed.backend)

    def record(changed: ModelRunner) -> None:
        changed.record(hello.max_rows, hello.max_model_len, hello.step_tokens)

    served = ServedModel(runner, version, settings.model, load, use, record, shared.adapters)
    return WeightsCommands(served, Groups(runner.loaded.device, _MOST_SENT * runner.loaded.parameter_bytes), hello)


def _beat(_: str, done: int, total: int) -> None:
    """A worker that loads while it serves is silent, and lives."""
    phases.beat()
