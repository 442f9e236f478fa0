"""`tokenyard keys` and `tokenyard worker`: workers on other machines than their scheduler's.

Knows which files go where and which process is started. The authentication of peers is in shared/curve.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from deploy.child import ChildSpec
from deploy.devices import resolve_devices
from deploy.environments import common_environment, cpu_share
from deploy.model_paths import resolve_model
from deploy.nodes import Nodes
from deploy.processes import (
    HANG_SECONDS,
    SECONDS_TO_STOP_A_RANK,
    command,
    keeper_spec,
    worker_hang_seconds,
    worker_specs,
)
from deploy.run_directory import keep_settings, parent_directory, private_run_directory
from deploy.serve import sweep_shared_memory
from deploy.supervisor import Supervisor
from deploy.timeline import Timeline
from shared import curve
from shared.endpoints import RunDirectory
from shared.resources import usable_cores, visible_cores
from shared.setting_forms import devices_of_ranks, local_devices
from shared.settings import Settings, SettingsError


def make_keys(folder: Path, peer: str) -> int:
    """Make the server's keys, or with a name those of one more peer, and print what to do with them."""
    if not peer:
        curve.make_server_keys(folder)
        print(f"made {folder}: add a machine with `tokenyard keys {folder} --peer NAME`, then serve with")
        print(f"  --worker-endpoint tcp://0.0.0.0:5600 --curve-keys {folder}")
        return 0
    carried = curve.make_peer_keys(folder, peer)
    print(f"{peer} may connect. Move {carried} to that machine (it has a secret: leave no copy here) and start there")
    print("  tokenyard worker tcp://THIS_MACHINE:5600 MODEL --curve-keys FOLDER")
    return 0


def work(settings: Settings, endpoint: str, index: int | None, nodes: Nodes | None = None) -> int:
    """Run one worker for a scheduler elsewhere until a signal. Returns the exit status of the process.

    Without an index the scheduler gives it one. With `nodes` these are this host's ranks of a worker on several hosts.
    """
    settings = resolve_devices(resolve_model(settings))
    if len(local_devices(settings.devices)) != 1:
        raise SettingsError(f"devices must name one device here, got {settings.devices!r}; start one worker for each")
    folder = Path(settings.curve_keys).expanduser().resolve()
    curve.check_peer_keys(folder)
    settings = dataclasses.replace(settings, curve_keys=str(folder))
    timeline = Timeline(on_ready=lambda: None, on_exit=lambda pid: sweep_shared_memory(), form=settings.log_format)
    with private_run_directory(parent_directory()) as directory:
        if nodes is None:
            specs = remote_specs(settings, directory, endpoint, index)
        else:
            specs = node_specs(settings, directory, endpoint, index, nodes)
            settings = nodes.of_group(settings)
        keep_settings(directory, settings)
        try:
            return Supervisor(specs, timeline).run()
        finally:
            timeline.close()


def remote_specs(settings: Settings, directory: RunDirectory, endpoint: str, index: int | None) -> list[ChildSpec]:
    """List the processes of a worker on one device, with the keeper of its weights where the settings want one."""
    spec = _worker_spec(settings, directory, endpoint, index)
    if not settings.weight_keeper:
        return worker_specs(spec, settings.tensor_parallel)
    spec = dataclasses.replace(spec, argv=[*spec.argv, "--keeper"])
    number = -1 if index is None else index
    name = spec.name.partition(":")[2]
    keeper = keeper_spec(name, directory, number, settings.devices, spec.env)
    return [keeper, *worker_specs(spec, settings.tensor_parallel)]


def node_specs(
    settings: Settings, directory: RunDirectory, endpoint: str, index: int | None, nodes: Nodes
) -> list[ChildSpec]:
    """List this host's ranks of a worker on several hosts, one for each of its devices; they live and end together."""
    worker = _worker_spec(settings, directory, endpoint, index)
    devices = devices_of_ranks(settings.devices, settings.tensor_parallel)
    return [
        dataclasses.replace(
            worker,
            name=f"{worker.name}.{rank}",
            argv=[*worker.argv, "--rank", str(rank), "--rendezvous", nodes.rendezvous, "--device", device],
            device=device,
            group=worker.name,
            # Its scheduler cannot end it, and all others wait for it.
            hang_seconds=max(HANG_SECONDS, 2.0 * settings.stall_timeout),
            stop_seconds=SECONDS_TO_STOP_A_RANK,
            stack_file=worker.stack_file.removesuffix(".stack") + (f".{rank}.stack" if rank else ".stack"),
        )
        for rank, device in zip(nodes.ranks(settings), devices, strict=True)
    ]


def _worker_spec(settings: Settings, directory: RunDirectory, endpoint: str, index: int | None) -> ChildSpec:
    """Return the process of a worker of one rank, or of the first of several."""
    environment = common_environment(directory)
    if settings.devices == "cpu":
        environment |= cpu_share(settings.tensor_parallel, usable_cores(), visible_cores())
    role = "model_worker:remote" if index is None else f"model_worker:{index}"
    where = ("--index", str(-1 if index is None else index), "--device", settings.devices)
    return ChildSpec(
        role,
        command(role, directory, *where, "--connect", endpoint),
        environment,
        settings.devices,
        counts_starts=True,
        forks=settings.devices == "cpu",
        hang_seconds=worker_hang_seconds(settings),
        stack_file=str(directory.stack_file(role)),
    )
