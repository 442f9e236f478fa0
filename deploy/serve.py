"""`tokenyard serve`: from settings to running processes.

Knows the order of a start. `processes.py` says which processes make a server, `supervisor.py` watches over them, and
`timeline.py` shows their start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from deploy import credentials
from deploy.child import ChildSpec
from deploy.devices import resolve_devices, unused_gpus
from deploy.listener import close_all, listening
from deploy.model_paths import resolve_adapters, resolve_further_models, resolve_model
from deploy.processes import child_specs
from deploy.readiness import Announcer
from deploy.run_directory import keep_settings, parent_directory, private_run_directory
from deploy.supervisor import Supervisor
from deploy.timeline import Timeline
from shared import logs, process_table
from shared.access_keys import with_digests
from shared.endpoints import RunDirectory
from shared.further_models import of_further_models
from shared.otel_settings import OtelMetricsSettings, OtelSettings
from shared.process_table import ProcessState
from shared.settings import Settings, SettingsError

SHARED_MEMORY = Path("/dev/shm")

_OPEN_FILES_WANTED = 65536
_ERRORS_KEPT = 50


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


def _raise_open_files_limit() -> None:
    """Raise the limit of open files: each client is one, and the usual soft limit of 1024 is for users of select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
