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
from deploy.hub_revision import cached_adapter, hub_revision, snapshot
from deploy.listener import listen
from deploy.readiness import Announcer
from deploy.run_directory import keep_settings, parent_directory, private_run_directory
from deploy.supervisor import Supervisor
from deploy.timeline import Timeline
from shared import logs, process_table
from shared.access_keys import with_digests
from shared.adapter_paths import check_files, folders_of
from shared.endpoints import RunDirectory
from shared.further_models import of_further_models
from shared.kernel_cache import forget_old_kernels, kernel_cache_directory
from shared.liveness import role_option
from shared.load_errors import missing_weights
from shared.process_table import ProcessState
from shared.resources import usable_cores, visible_cores
from shared.settings import Settings, SettingsError

EMBEDDED_NAME = "tokenyard-demo"
SHARED_MEMORY = Path("/dev/shm")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_OPEN_FILES_WANTED = 65536
_SECONDS_AFTER_DRAIN = 6.0
_ERRORS_KEPT = 50
_SECONDS_TO_STOP = 10.0
# An API process or a scheduler that has not come round its loop for so many seconds is replaced.
HANG_SECONDS = 30.0


def serve(given: Settings, given_now: Callable[[], Settings] | None = None) -> int:
    """Serve until a signal. Returns the exit status. SettingsError names the setting that cannot work and the remedy.

    `given_now` gives the operator's settings anew, for keys and certificates that may change meanwhile.
    """
    settings = with_digests(credentials.resolve_tls(resolve_devices(resolve_further_models(resolve_model(given)))))
    settings = resolve_adapters(resolve_curve(settings))
    _raise_open_files_limit()
    with listen(settings.host, settings.port) as listener, private_run_directory(parent_directory()) as directory:
        keep_settings(directory, settings)
        try:
            further_models = of_further_models(settings, directory)
        except ValueError as error:  # a path that is too long
            raise SettingsError(str(error)) from None
        for further, place in further_models:
            place.path.mkdir(0o700)
            keep_settings(place, further)
        return _supervise(settings, directory, listener, given_now or (lambda: given))


def _supervise(
    settings: Settings, directory: RunDirectory, listener: socket.socket, given_now: Callable[[], Settings]
) -> int:
    announcer = Announcer(settings, lambda: _scheduler_problem(directory))
    timeline = _Chronicle(
        directory,
        on_ready=lambda: announcer.start(timeline.say),
        on_exit=lambda pid: _forget(pid, directory),
        form=settings.log_format,
        on_stopping=listener.close,  # from now on the API processes alone say how long connections are accepted
    )
    sweep_shared_memory()
    for each in (settings, *(further for further, _ in of_further_models(settings, directory))):
        timeline.output(f"tokenyard: {each.model} as {each.public_model_name!r} on {each.devices}")
    for text in credentials.exposed(given_now()):
        timeline.say("WARNING", text)
    kept = credentials.Credentials(settings, directory, given_now, timeline.say)
    try:
        specs = child_specs(settings, directory, listener.fileno())
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


def resolve_model(settings: Settings) -> Settings:
    """Make `model` a hub name, an absolute directory or the absolute path of a GGUF file."""
    if settings.model == "":
        name = settings.served_model_name or EMBEDDED_NAME
        return dataclasses.replace(settings, model=_embedded_model(), served_model_name=name)
    if (gguf := _find_gguf(settings)) is not None:
        return gguf
    path = Path(settings.model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SettingsError(
                f"model {settings.model!r} cannot be served: it is a folder without config.json, so not a Hugging Face "
                f"model; {missing_weights(path)}"
            )
        return dataclasses.replace(settings, model=str(path.resolve()))
    if pinned := hub_revision(settings.model):
        name = settings.served_model_name or Path(pinned[0]).name
        return dataclasses.replace(settings, model=str(snapshot(*pinned)), served_model_name=name)
    if path.exists():
        raise SettingsError(
            f"model {settings.model!r} is a file; give the folder that holds config.json, or a file .gguf"
        )
    if not _HUB_NAME.fullmatch(settings.model):
        raise SettingsError(f"model {settings.model!r} is neither a folder here nor a hub name (like Qwen/Qwen3-0.6B)")
    return settings


def _find_gguf(settings: Settings) -> Settings | None:
    """Return the settings with the GGUF file that `model` means; None where it means none. SettingsError for one that
    cannot be served."""
    path = Path(settings.model).expanduser()
    if not (settings.model.endswith(".gguf") or ":" in settings.model or any(path.glob("*.gguf"))):
        return None
    # numpy comes with it, and most models are no GGUF files.
    from shared.gguf.check import check_gguf
    from shared.gguf.find import find_gguf

    try:
        found = find_gguf(settings.model)
        if found is None:
            return None
        check_gguf(found)
    except (ValueError, OSError) as error:
        raise SettingsError(str(error)) from None
    if settings.task not in ("auto", "generate"):
        raise SettingsError(
            f"task {settings.task!r}: model {found} is a GGUF file, and these generate text only; use task generate"
        )
    # What is no path is HUB/NAME:QUANTIZATION, which is a name. A folder may be given as "." and the like.
    own_name = Path(os.path.abspath(path)).name.removesuffix(".gguf") if path.exists() else settings.model
    return dataclasses.replace(settings, model=found, served_model_name=settings.served_model_name or own_name)


def resolve_further_models(settings: Settings) -> Settings:
    """Make the models of `also` hub names or absolute directories."""
    found = {name: _resolved(name, model) for name, model in settings.further_models.items()}
    return dataclasses.replace(settings, also=",".join(f"{name}={model}" for name, model in found.items()))


def _resolved(name: str, model: str) -> str:
    try:
        found = resolve_model(Settings(model=model)).model
    except SettingsError as error:
        raise SettingsError(f"also {name}={model}: {error}") from None
    if "," in found:
        raise SettingsError(f"also {name}={model}: the folder {found!r} has a comma, which separates models; rename it")
    return found


def resolve_adapters(settings: Settings) -> Settings:
    """Make the folders of adapters absolute, also of those that are named as on the hub.

    SettingsError for a folder that is missing, or has no adapter.
    """
    found = {}
    for name, path in settings.adapter_paths.items():
        try:
            folder = (cached_adapter(path) or Path(path).expanduser()).resolve()
            # The hub's cache consists of links. Which of them are followed is the worker's to say.
            check_files(folder, links=True)
        except (ValueError, OSError) as error:
            raise SettingsError(f"lora {name}={path}: {error}") from None
        found[name] = str(folder)
    folders = [folder.absolute() for folder in folders_of(settings.lora_dirs)]
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(f"lora_dirs names {str(folder)!r}, which is no folder here: make it, or leave it out")
    for folder in folders_of(settings.weights_dirs):
        if not folder.is_dir():
            raise SettingsError(
                f"weights_dirs names {str(folder)!r}, which is no folder here: make it, or leave it out"
            )
    return dataclasses.replace(
        settings,
        weights_dirs=",".join(str(folder.absolute()) for folder in folders_of(settings.weights_dirs)),
        lora=",".join(f"{name}={folder}" for name, folder in found.items()),
        lora_dirs=",".join(map(str, folders)),
    )


def _embedded_model() -> str:
    # Its package is only needed here, and not when another model is served.
    from deploy.embedded_model import EMBEDDED_MODEL_PATH

    path = Path(EMBEDDED_MODEL_PATH)
    if not (path / "config.json").is_file():
        raise SettingsError(f"the embedded model is missing from {path}; name a MODEL, or make it: make demo-model")
    return str(path)


def resolve_devices(settings: Settings) -> Settings:
    """Make `devices` a list: every GPU that torch could use, else one worker on the CPU.

    SettingsError for a GPU that this build of torch, or this machine, does not have. (A machine without any may be one
    whose driver is still being loaded: the worker judges that.)
    """
    wanted = [device for device in settings.devices.split(",") if device.startswith("cuda:")]
    if wanted and machine.torch_version().endswith("+cpu"):
        raise SettingsError(
            f"devices {settings.devices!r}: torch {machine.torch_version()} is a build without CUDA; "
            "use cpu, or install one with CUDA"
        )
    seen = machine.cuda_devices()
    if seen and (missing := sorted(set(wanted) - set(seen))):
        raise SettingsError(f"devices names {', '.join(missing)}, and this machine has {', '.join(seen)}")
    if settings.devices != "auto":
        return settings
    return dataclasses.replace(settings, devices=",".join(seen) or "cpu")


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


def child_specs(settings: Settings, directory: RunDirectory, listener: int) -> list[ChildSpec]:
    """List the processes of one server, in the order of their dependence: stopping goes backwards.

    `listener` is the descriptor of the listening socket.
    """
    devices = settings.devices.split(",")
    common = common_environment(directory)
    served = [
        ("", settings, directory),
        *((f"{s.served_model_name}:", s, d) for s, d in of_further_models(settings, directory)),
    ]
    sharing = ("--models", str(len(served))) if len(served) > 1 else ()
    worker = {**common, **cpu_share(devices.count("cpu") * len(served), usable_cores(), visible_cores())}
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
            ChildSpec(
                f"model_worker:{name}{index}",
                command(f"model_worker:{index}", place, "--index", str(index), "--device", device, *sharing),
                worker if device == "cpu" else common,
                device,
                counts_starts=True,
                stop_seconds=_SECONDS_TO_STOP,
                # CUDA cannot be used by the fork of a process that has touched it, and an import may do that.
                forks=device == "cpu",
                hang_seconds=worker_hang_seconds(of_model),
                stack_file=str(place.stack_file(f"model_worker:{index}")),
                model=name,
            )
            for name, of_model, place in served
            for index, device in enumerate(devices)
        ),
        *(
            ChildSpec(
                f"api_server:{index}",
                command(f"api_server:{index}", directory, "--index", str(index), "--listener", str(listener)),
                common,
                stop_seconds=settings.drain_delay + settings.drain_timeout + _SECONDS_AFTER_DRAIN,
                rereads=True,
                rolling=True,
                pass_fds=(listener,),
                hang_seconds=HANG_SECONDS,
                stack_file=str(directory.stack_file(f"api_server:{index}")),
            )
            for index in range(settings.api_servers)
        ),
    ]


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


def _raise_open_files_limit() -> None:
    """Raise the limit of open files: each client is one, and the usual soft limit of 1024 is for users of select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
