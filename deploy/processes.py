"""The processes of one server: their commands, their environments and how long each may take.

Knows roles and settings. Watching over the processes is supervisor.py's work.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping

from deploy.child import ChildSpec
from deploy.environments import common_environment, cpu_share, one_thread
from deploy.model_paths import is_background
from shared.endpoints import RunDirectory
from shared.further_models import of_further_models
from shared.liveness import role_option
from shared.resources import usable_cores, visible_cores
from shared.setting_forms import local_devices
from shared.settings import Settings

_SECONDS_AFTER_DRAIN = 6.0
_SECONDS_TO_STOP = 10.0
# A rank of a group waits for others, which may be stopped.
SECONDS_TO_STOP_A_RANK = 5.0
# An API process or a scheduler that has not come round its loop for so many seconds is replaced.
HANG_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """A model that is served, and its folder. `prefix` is that of its processes' names: empty for the first model.

    Processes in the `background` have one thread each on the CPU, and wait for those of the others.
    """

    prefix: str
    settings: Settings
    folder: RunDirectory
    background: bool


def child_specs(settings: Settings, directory: RunDirectory, *listeners: int) -> list[ChildSpec]:
    """List the processes of one server, in the order of their dependence: stopping goes backwards.

    `listeners` are the descriptors of the listening sockets.
    """
    common = common_environment(directory)
    further = (
        _Model(f"{each.served_model_name}:", each, folder, is_background(each))
        for each, folder in of_further_models(settings, directory)
    )
    models = [_Model("", settings, directory, background=False), *further]
    devices = local_devices(settings.devices)
    return [
        *(_scheduler(model, common) for model in models),
        *(
            keeper_spec(f"{model.prefix}{index}", model.folder, index, device, common)
            for model in models
            for index, device in enumerate(devices)
            if _is_kept(settings, device)
        ),
        *(
            spec
            for model in models
            for index in range(len(devices))
            for spec in worker_specs(_worker(settings, models, model, index, common), model.settings.tensor_parallel)
        ),
        *_api_servers(settings, directory, listeners, common),
    ]


def _scheduler(model: _Model, common: dict[str, str]) -> ChildSpec:
    return ChildSpec(
        f"scheduler:{model.prefix}".rstrip(":"),
        command("scheduler", model.folder),
        common,
        stop_seconds=_SECONDS_TO_STOP,
        hang_seconds=HANG_SECONDS,
        stack_file=str(model.folder.stack_file("scheduler")),
        model=model.prefix,
    )


def _worker(settings: Settings, models: list[_Model], model: _Model, index: int, common: dict[str, str]) -> ChildSpec:
    """Return the worker of a model on the device with this index. The workers of all `models` share the devices."""
    devices = local_devices(settings.devices)
    device = devices[index]
    yields = device == "cpu" and model.background
    sharers = sum(not each.background for each in models)
    arguments = ["--index", str(index), "--device", device]
    if yields:
        arguments.append("--background")
    else:
        workers = len(models) * devices.count(device) if device.startswith("cuda") else sharers
        arguments += ["--models", str(workers)] if workers > 1 else []
        arguments += ["--keeper"] if _is_kept(settings, device) else []
    if device != "cpu" or model.background:
        threads = one_thread()
    else:
        workers = devices.count("cpu") * sharers * settings.tensor_parallel
        threads = cpu_share(workers, usable_cores(), visible_cores())
    return ChildSpec(
        f"model_worker:{model.prefix}{index}",
        command(f"model_worker:{index}", model.folder, *arguments),
        {**common, **threads},
        device,
        counts_starts=True,
        stop_seconds=_SECONDS_TO_STOP,
        # CUDA cannot be used by the fork of a process that has touched it, and an import may do that.
        forks=device == "cpu",
        hang_seconds=worker_hang_seconds(model.settings),
        stack_file=str(model.folder.stack_file(f"model_worker:{index}")),
        model=model.prefix,
    )


def _api_servers(
    settings: Settings, directory: RunDirectory, listeners: tuple[int, ...], common: dict[str, str]
) -> Iterator[ChildSpec]:
    doors = [word for listener in listeners for word in ("--listener", str(listener))]
    for index in range(settings.api_servers):
        yield ChildSpec(
            f"api_server:{index}",
            command(f"api_server:{index}", directory, "--index", str(index), *doors),
            common,
            stop_seconds=settings.drain_delay + settings.drain_timeout + _SECONDS_AFTER_DRAIN,
            rereads=True,
            rolling=True,
            pass_fds=listeners,
            hang_seconds=HANG_SECONDS,
            stack_file=str(directory.stack_file(f"api_server:{index}")),
        )


def _is_kept(settings: Settings, device: str) -> bool:
    return settings.weight_keeper and device.startswith("cuda")


def worker_specs(worker: ChildSpec, ranks: int) -> list[ChildSpec]:
    """Return the processes of a worker: itself, or a group of ranks that live and end together."""
    if ranks == 1:
        return [worker]
    first = dataclasses.replace(worker, group=worker.name, stop_seconds=SECONDS_TO_STOP_A_RANK)
    others = (
        dataclasses.replace(
            first,
            name=f"{worker.name}.{rank}",
            argv=[*worker.argv, "--rank", str(rank)],
            stack_file=worker.stack_file.removesuffix(".stack") + f".{rank}.stack",
        )
        for rank in range(1, ranks)
    )
    return [first, *others]


def keeper_spec(name: str, directory: RunDirectory, index: int, device: str, env: Mapping[str, str]) -> ChildSpec:
    """Return the process that keeps the weights of a worker on a GPU."""
    where = ("--index", str(index), "--device", device)
    return ChildSpec(
        f"weight_keeper:{name}",
        command(f"model_worker.keeper:{index}", directory, *where),
        env,
        device,
        stop_seconds=_SECONDS_TO_STOP,
        hang_seconds=HANG_SECONDS,
        stack_file=str(directory.stack_file(f"weight_keeper:{index}")),
        vital=False,
    )


def worker_hang_seconds(settings: Settings) -> float:
    """Return the seconds for which a worker may be silent.

    Its scheduler judges it much sooner, by its steps, which may be long; this limit is for a worker on another machine,
    which its scheduler cannot end.
    """
    return max(300.0, 20.0 * settings.stall_timeout)


def command(role: str, directory: RunDirectory, *arguments: str) -> list[str]:
    """Make the command that starts the module whose name is the role's, up to a colon."""
    module = role.partition(":")[0]
    return [sys.executable, *role_option(role), "-m", module, "--run-dir", str(directory.path), *arguments]
