"""`tokenyard serve`: from settings to running processes.

Knows which processes make a server, in which order, and the environment of each. Watching over them is supervisor.py's
work, showing their start timeline.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from deploy import credentials, machine
from deploy.child import ChildSpec
from deploy.listener import close_all, listening
from deploy.model_paths import is_background, resolve_adapters, resolve_further_models, resolve_model
from deploy.readiness import Announcer
from deploy.run_directory import keep_settings, parent_directory, private_run_directory
from deploy.supervisor import Supervisor
from deploy.timeline import Timeline
from shared import logs, process_table
from shared.access_keys import with_digests
from shared.endpoints import RunDirectory
from shared.further_models import of_further_models
from shared.kernel_cache import forget_old_kernels, kernel_cache_directory
from shared.liveness import role_option
from shared.otel_settings import OtelMetricsSettings, OtelSettings
from shared.process_table import ProcessState
from shared.resources import usable_cores, visible_cores
from shared.setting_forms import local_devices, ranks_of
from shared.settings import Settings, SettingsError

SHARED_MEMORY = Path("/dev/shm")

_OPEN_FILES_WANTED = 65536
_SECONDS_AFTER_DRAIN = 6.0
_ERRORS_KEPT = 50
_SECONDS_TO_STOP = 10.0
# A rank of a group waits for others, which may be stopped.
SECONDS_TO_STOP_A_RANK = 5.0
# An API process or a scheduler that has not come round its loop for so many seconds is replaced.
HANG_SECONDS = 30.0


def serve(given: Settings, given_now: Callable[[], Settings] | None = None) -> int:
    """Serve until a signal. Returns the exit status. SettingsError names the setting that cannot work and the remedy.

    `given_now` gives the operator's settings anew, for keys and certificates that may change meanwhile.
    """
    settings = with_digests(credentials.resolve_tls(resolve_devices(resolve_further_models(resolve_model(given)))))
    settings = resolve_adapters(resolve_curve(settings))
    OtelMetricsSettings.of(os.environ)
    OtelSettings.of(os.environ)  # an environment that cannot work is refused here, and not by each API process
    _raise_open_files_limit()
    with listening(settings) as listeners, private_run_directory(parent_directory()) as directory:
        keep_settings(directory, settings)
        try:
            further_models = of_further_models(settings, directory)
        except ValueError as error:  # a path that is too long
            raise SettingsError(str(error)) from None
        for further, place in further_models:
            place.path.mkdir(0o700)
            keep_settings(place, further)
        return _supervise(settings, directory, listeners, given_now or (lambda: given))


def _supervise(
    settings: Settings, directory: RunDirectory, listeners: list[socket.socket], given_now: Callable[[], Settings]
) -> int:
    announcer = Announcer(settings, lambda: _scheduler_problem(directory))
    timeline = _Chronicle(
        directory,
        on_ready=lambda: announcer.start(timeline.say),
        on_exit=lambda pid: _forget(pid, directory),
        form=settings.log_format,
        # From now on the API processes alone say how long connections are accepted.
        on_stopping=lambda: close_all(listeners),
    )
    sweep_shared_memory()
    for each in (settings, *(further for further, _ in of_further_models(settings, directory))):
        timeline.output(f"tokenyard: {each.model} as {each.public_model_name!r} on {each.devices}")
    for text in credentials.exposed(given_now()):
        timeline.say("WARNING", text)
    if text := unused_gpus(given_now().devices, settings.devices):
        timeline.say("WARNING", text)
    kept = credentials.Credentials(settings, directory, given_now, timeline.say)
    try:
        specs = child_specs(settings, directory, *(listener.fileno() for listener in listeners))
        return Supervisor(specs, timeline, on_hangup=kept.read_again).run()
    finally:
        announcer.stop()
        timeline.close()
        sweep_shared_memory()


class _Chronicle(Timeline):
    """A time line that also records failures, for `tokenyard status` and `/metrics`."""

    def __init__(
        self,
        directory: RunDirectory,
        on_ready: Callable[[], None],
        on_exit: Callable[[int], None],
        on_stopping: Callable[[], None],
        form: str,
    ) -> None:
        super().__init__(on_ready, on_exit, on_stopping=on_stopping, form=form)
        self._directory = directory
        self._errors: deque[str] = deque(maxlen=_ERRORS_KEPT)
        self._states: dict[str, ProcessState] = {}

    def say(self, level: str, text: str) -> None:
        super().say(level, text)
        if level == "ERROR":
            self._errors.append(f"{logs.utc(time.time())} {text}")
            with contextlib.suppress(OSError):
                self._directory.deaths_file.write_text("\n".join(self._errors) + "\n")

    def started(self, child: ChildSpec) -> None:
        super().started(child)
        self._note(child, silent_since=None)

    def silent(self, child: ChildSpec, seconds: float) -> None:
        super().silent(child, seconds)
        self._note(child, silent_since=time.monotonic() - seconds if seconds else None)

    def hung(self, child: ChildSpec) -> None:
        self._note(child, hangs=self._states[child.name].hangs + 1)

    def _note(self, child: ChildSpec, **changes: Any) -> None:
        known = self._states.get(child.name, ProcessState())
        self._states[child.name] = dataclasses.replace(known, **changes)
        with contextlib.suppress(OSError):
            process_table.write(self._directory.processes_file, self._states)


def _scheduler_problem(directory: RunDirectory) -> str | None:
    # ZeroMQ is only needed here, and few servers want certificates of their clients.
    from deploy.status import ask

    for place in (directory, *directory.of_further_models()):
        answer = ask(place, "")
        if answer is None:
            return "the scheduler does not answer"
        if not answer.status.ready:
            return answer.status.reason
    return None


def _forget(pid: int, directory: RunDirectory) -> None:
    """Remove the state of an ended process: its gauges (its counters stay), and its arrays in shared memory."""
    mark_process_dead(pid, str(directory.metrics_directory))  # type: ignore[no-untyped-call]
    sweep_shared_memory()


def sweep_shared_memory() -> None:
    """Remove the arrays of processes that were killed, of this server and of earlier ones."""
    if any(SHARED_MEMORY.glob("tokenyard-*")):
        # numpy comes with it, and most servers never get here.
        from interfaces import sweep_segments

        sweep_segments()


def resolve_devices(settings: Settings) -> Settings:
    """Make `devices` a list: every GPU that torch could use, else one worker on the CPU. A worker of several GPUs is a
    group of as many ranks.

    SettingsError for a GPU that this build of torch, or this machine, does not have. (A machine without any may be one
    whose driver is still being loaded: the worker judges that.)
    """
    if settings.devices == "none":
        return settings
    wanted = [device for device in re.split("[,+]", settings.devices) if device.startswith("cuda:")]
    if wanted and machine.torch_version().endswith("+cpu"):
        raise SettingsError(
            f"devices {settings.devices!r}: torch {machine.torch_version()} is a build without CUDA; "
            "use cpu, or install one with CUDA"
        )
    seen = machine.cuda_devices()
    if seen and (missing := sorted(set(wanted) - set(seen))):
        raise SettingsError(f"devices names {', '.join(missing)}, and this machine has {', '.join(seen)}")
    ranks = settings.tensor_parallel
    if settings.devices != "auto":
        [several] = {ranks} if "+" not in settings.devices else ranks_of(settings.devices)
        return dataclasses.replace(settings, tensor_parallel=several)
    if seen and len(seen) < ranks:
        raise SettingsError(f"tensor_parallel {ranks} wants as many GPUs, and this machine has {', '.join(seen)}")
    groups = ["+".join(seen[first : first + ranks]) for first in range(0, len(seen) // ranks * ranks, ranks)]
    return dataclasses.replace(settings, devices=",".join(groups) or "cpu")


def unused_gpus(wanted: str, devices: str) -> str:
    """Name the GPUs that `auto` has left over, because they are too few for a group; empty if there are none."""
    used = re.split("[,+]", devices)
    left = [gpu for gpu in machine.cuda_devices() if gpu not in used] if wanted == "auto" else []
    return f"devices auto leaves {', '.join(left)} unused: too few for one more group" if left else ""


def resolve_curve(settings: Settings) -> Settings:
    """Make the folder of CURVE keys absolute. SettingsError for a tcp endpoint without usable keys."""
    if not settings.worker_endpoint:
        return settings
    if not settings.curve_keys:
        raise SettingsError(
            f"worker_endpoint {settings.worker_endpoint!r} wants curve_keys; make a folder: tokenyard keys FOLDER"
        )
    # ZeroMQ is only needed here, and few servers have workers elsewhere.
    from shared.curve import check_server_keys

    folder = Path(settings.curve_keys).expanduser().resolve()
    check_server_keys(folder)
    return dataclasses.replace(settings, curve_keys=str(folder))


def child_specs(settings: Settings, directory: RunDirectory, *listeners: int) -> list[ChildSpec]:
    """List the processes of one server, in the order of their dependence: stopping goes backwards.

    `listeners` are the descriptors of the listening sockets.
    """
    devices = local_devices(settings.devices)
    ranks = settings.tensor_parallel
    common = common_environment(directory)
    served = [
        ("", settings, directory),
        *((f"{s.served_model_name}:", s, d) for s, d in of_further_models(settings, directory)),
    ]
    doors = [word for listener in listeners for word in ("--listener", str(listener))]

    # These have one thread each on the CPU, which waits for those of the others.
    background = {name for name, of_model, _ in served[1:] if is_background(of_model)}
    sharers = len(served) - len(background)

    def place_on(name: str, device: str) -> tuple[str, ...]:
        if device == "cpu" and name in background:
            return ("--device", device, "--background")
        workers = len(served) * devices.count(device) if device.startswith("cuda") else sharers
        shared = ("--models", str(workers)) if workers > 1 else ()
        return ("--device", device, *shared, *(("--keeper",) if is_kept(device) else ()))

    def is_kept(device: str) -> bool:
        return settings.weight_keeper and device.startswith("cuda")

    def environment(name: str, device: str) -> dict[str, str]:
        if device != "cpu" or name in background:
            return {**common, **one_thread()}
        return {**common, **cpu_share(devices.count("cpu") * sharers * ranks, usable_cores(), visible_cores())}

    return [
        *(
            ChildSpec(
                f"scheduler:{name}".rstrip(":"),
                command("scheduler", place),
                common,
                stop_seconds=_SECONDS_TO_STOP,
                hang_seconds=HANG_SECONDS,
                stack_file=str(place.stack_file("scheduler")),
                model=name,
            )
            for name, _, place in served
        ),
        *(
            keeper_spec(f"{name}{index}", place, index, device, common)
            for name, _, place in served
            for index, device in enumerate(devices)
            if is_kept(device)
        ),
        *(
            spec
            for name, of_model, place in served
            for index, device in enumerate(devices)
            for spec in worker_specs(
                ChildSpec(
                    f"model_worker:{name}{index}",
                    command(f"model_worker:{index}", place, "--index", str(index), *place_on(name, device)),
                    environment(name, device),
                    device,
                    counts_starts=True,
                    stop_seconds=_SECONDS_TO_STOP,
                    # CUDA cannot be used by the fork of a process that has touched it, and an import may do that.
                    forks=device == "cpu",
                    hang_seconds=worker_hang_seconds(of_model),
                    stack_file=str(place.stack_file(f"model_worker:{index}")),
                    model=name,
                ),
                of_model.tensor_parallel,
            )
        ),
        *(
            ChildSpec(
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
            for index in range(settings.api_servers)
        ),
    ]


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


def common_environment(directory: RunDirectory, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Make the environment that every child gets on top of the supervisor's."""
    kernels = kernel_cache_directory(environ)
    if machine.is_writable(kernels):
        forget_old_kernels(kernels)
    else:
        kernels = directory.path / "numba"
    environment = {
        "NUMBA_CACHE_DIR": str(kernels),
        "PROMETHEUS_MULTIPROC_DIR": str(directory.metrics_directory),
        "PYTHONUNBUFFERED": "1",
        # torch makes this folder when it is imported, and would leave it in TMPDIR.
        "TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{directory.path}/torchinductor",
        # Without docstrings transformers cannot be imported, and our assertions are part of the code.
        "PYTHONOPTIMIZE": "",
        # Our packages have common names: a folder `scheduler` where the operator happens to be must not be run.
        "PYTHONSAFEPATH": "1",
    }
    root = Path(__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        paths = [str(root), environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def cpu_share(workers: int, usable: int, visible: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Split the usable cores among the CPU workers, as environment variables for thread counts.

    Empty where the libraries' own choice, all visible cores, is right, or the operator has chosen.
    """
    share = max(1, usable // max(1, workers))
    if share == visible or "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(share), "NUMBA_NUM_THREADS": str(share)}


def one_thread(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Keep a GPU's worker, or one in the background, to one thread, as environment variables, unless the operator has
    chosen.

    The little that it computes on the CPU is no faster on many threads, and these would take others' cores.
    """
    return {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}


def _raise_open_files_limit() -> None:
    """Raise the limit of open files: each client is one, and the usual soft limit of 1024 is for users of select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
