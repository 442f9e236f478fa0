"""`tokenyard ray up`: a server here, and its workers on the nodes of a Ray cluster.

Ray chooses the nodes, starts an actor for each worker, and starts it elsewhere when its node is lost. It carries
nothing else: steps and tokens go through the worker endpoint, as with any worker of another machine. Knows Ray, which
is an optional extra and is imported here alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import ray_child
from shared import curve
from shared.settings import Settings, SettingsError
from shared.settings_sources import ENV_PREFIX

# Seconds between two lines about workers that find no place.
_SECONDS_BETWEEN_LINES = 10.0
# Seconds between two looks at the server and the workers.
_LOOK_SECONDS = 0.5
# Seconds until a worker that gave up is started again, and until one that was lost is asked where it is now.
_PAUSE_SECONDS = 5.0
_SECONDS_TO_MOVE = 1.0
# Seconds in which the head must take a connection.
_SECONDS_TO_CONNECT = 5.0
# Exit status of a worker whose settings cannot work on its node.
_HOPELESS = 2
# Seconds beyond its drain for which the server may take to end.
_SECONDS_TO_STOP = 30.0
# Seconds in which a worker is to end.
_SECONDS_TO_END = 10.0
# Settings of the groups `model` and `capacity` that are the server's own.
_SERVERS_OWN = frozenset({"model", "devices", "also", "lora"})


@dataclass(frozen=True)
class Wanted:
    """What is asked of the cluster: the number of workers, and what each of them takes of its node."""

    workers: int
    cpus: int
    gpus: int

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("workers", self.workers, 1, 1024),
            ("cpus", self.cpus, 1, 1024),
            ("gpus-per-worker", self.gpus, 0, 1),
        ):
            if not least <= value <= most:
                raise SettingsError(f"{name} must be {least} to {most}, got {value}")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker, in Ray's words."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})


class WorkerActor:
    """One worker, on the node where Ray has put this actor. The actor's end is the worker's end."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], keys: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._environment = environment
        self._keys = keys
        self._process: subprocess.Popen[bytes] | None = None

    def node(self) -> str:
        """Name the node."""
        return _node(_ray())

    def run(self) -> int:
        """Run the worker until it ends. Returns its exit status."""
        self._process = ray_child.start(self._arguments, self._environment, self._keys)
        return self._process.wait()

    def end(self) -> None:
        """End the worker in order, so that it leaves nothing on its node. Ray would kill it."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)


def up(settings: Settings, wanted: Wanted) -> int:
    """Serve with workers of the cluster until a signal, or until the server ends. Returns the server's exit status."""
    if settings.also:
        raise SettingsError(f"also {settings.also!r} wants workers on the server's machine; use `tokenyard serve`")
    for name in ("devices", "curve_keys"):
        value = getattr(settings, name)
        if value != getattr(Settings(), name):
            raise SettingsError(f"{name} must be left out, since the cluster's workers have their own, got {value!r}")
    ray = _connect()
    try:
        with tempfile.TemporaryDirectory(prefix="tokenyard-ray-") as folder:
            keys = Path(folder) / "keys"
            curve.make_server_keys(keys)
            peers = [curve.make_peer_keys(keys, f"ray-{index}") for index in range(wanted.workers)]
            _say(f"the server is on {_node(ray)}")
            settings, endpoint = with_endpoint(settings, ray.util.get_node_ip_address(), keys)
            with _serving(settings) as server:
                workers = _Workers(ray, wanted, settings, endpoint, peers)
                try:
                    workers.watch(server)
                finally:
                    workers.end()
                return server.wait()
    finally:
        # The actors belong to this driver, and end with it.
        ray.shutdown()


def with_endpoint(settings: Settings, address: str, keys: Path) -> tuple[Settings, str]:
    """Return the settings of a server that has no local worker, and the endpoint at which its workers find it."""
    given = settings.worker_endpoint or f"tcp://{address}:{_free_port(address)}"
    host, _, port = given.removeprefix("tcp://").rpartition(":")
    own = dataclasses.replace(settings, devices="none", worker_endpoint=given, curve_keys=str(keys))
    return own, f"tcp://{address}:{port}" if host in ("0.0.0.0", "*") else given


def environment(settings: Settings, for_worker: bool) -> dict[str, str]:
    """Write the settings that differ from the defaults as variables; for a worker those that it shares."""
    usual = Settings()
    variables = {}
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        shared = field.metadata["group"] in ("model", "capacity") and field.name not in _SERVERS_OWN
        if value != getattr(usual, field.name) and (shared or field.name == "log_level" or not for_worker):
            variables[ENV_PREFIX + field.name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables


class _Workers:
    """The workers' actors, and what each of them does just now."""

    def __init__(self, ray: Any, wanted: Wanted, settings: Settings, endpoint: str, peers: Sequence[Path]) -> None:
        self._ray = ray
        self._wanted = wanted
        self._peers = peers
        self._variables = environment(settings, for_worker=True)
        model = settings.model
        if model and Path(model).expanduser().exists():
            # The working directory of an actor is another one.
            model = str(Path(model).expanduser().resolve())
        self._arguments = ["worker", endpoint, *([model] if model else [])]
        self._arguments += ["--devices", "auto" if wanted.gpus else "cpu"]
        self._group = ray.util.placement_group([wanted.bundle] * wanted.workers, strategy="SPREAD")
        self._actors: list[Any] = []
        # The calls under way: Ray's reference, the method, and the worker's number.
        self._calls: dict[Any, tuple[str, int]] = {}
        # When workers that gave up are started again, by number.
        self._paused: dict[int, float] = {}

    def watch(self, server: subprocess.Popen[bytes]) -> None:
        """Place the workers and keep them running while the server does."""
        placed = self._group.ready()
        next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        while server.poll() is None and not self._ray.wait([placed], timeout=_LOOK_SECONDS)[0]:
            if time.monotonic() >= next_line:
                next_line += _SECONDS_BETWEEN_LINES
                self._say_what_is_missing()
        if server.poll() is not None:
            return
        self._actors = [self._actor(index) for index in range(self._wanted.workers)]
        for index in range(self._wanted.workers):
            self._call(index)
        while server.poll() is None:
            self._look()

    def end(self) -> None:
        """End the workers that can be reached, for a bounded time."""
        ends = [actor.end.remote() for actor in self._actors]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_SECONDS_TO_END)

    def _actor(self, index: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        keys = {file.name: file.read_text() for file in self._peers[index].iterdir()}
        remote = self._ray.remote(WorkerActor).options(
            num_cpus=self._wanted.cpus,
            num_gpus=self._wanted.gpus,
            max_restarts=-1,
            # `end` is called while `run` goes on.
            max_concurrency=2,
            scheduling_strategy=strategy,
        )
        return remote.remote(self._arguments, self._variables, keys)

    def _call(self, index: int) -> None:
        """Ask an actor where it is, and to run its worker. Ray keeps the order."""
        actor = self._actors[index]
        self._calls[actor.node.remote()] = "node", index
        self._calls[actor.run.remote()] = "run", index

    def _look(self) -> None:
        now = time.monotonic()
        for index in [index for index, at in self._paused.items() if now >= at]:
            del self._paused[index]
            self._call(index)
        if not self._calls:
            time.sleep(_LOOK_SECONDS)
            return
        ended, _ = self._ray.wait(list(self._calls), timeout=_LOOK_SECONDS)
        for reference in ended:
            method, index = self._calls.pop(reference)
            try:
                result = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._lost(index, method, error)
            else:
                self._ended(index, result) if method == "run" else _say(f"worker {index} is on {result}")

    def _lost(self, index: int, method: str, error: Exception) -> None:
        if method != "run":
            # The other call of the pair fails, too.
            return
        _say(f"worker {index} was lost and is placed anew ({type(error).__name__})")
        self._paused[index] = time.monotonic() + _SECONDS_TO_MOVE

    def _ended(self, index: int, status: int) -> None:
        if status == _HOPELESS:
            _say(f"worker {index} cannot work on its node (its reason is above) and is not started again")
            return
        _say(f"worker {index} ended with status {status} and is started again in {_PAUSE_SECONDS:.0f} s")
        self._paused[index] = time.monotonic() + _PAUSE_SECONDS

    def _say_what_is_missing(self) -> None:
        free = self._ray.available_resources()
        rest = {name: free.get(name, 0) for name in self._wanted.bundle}
        _say(
            f"{self._wanted.workers} workers with {_listed(self._wanted.bundle)} each find no place; the cluster has "
            f"{_listed(rest)} free: add nodes, or lower --workers or --cpus"
        )


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise SettingsError(
            f"ray is not installed ({error}); install the extra: pip install 'tokenyard[ray]'"
        ) from None
    return ray


def _connect() -> Any:
    """Connect to the cluster. SettingsError where there is none."""
    ray = _ray()
    address = os.environ.get("RAY_ADDRESS", "auto")
    _check_reachable(address)
    try:
        ray.init(address=address, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"RAY_ADDRESS {address!r} leads to no cluster ({error}); start one: ray start --head"
        ) from None
    return ray


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray would try for minutes. SettingsError names it."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if "://" in address or not host or not port.isdecimal():
        raise SettingsError(f"RAY_ADDRESS must be HOST:PORT of the cluster's head, or unset, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"RAY_ADDRESS {address!r} cannot be reached ({error}); start one: ray start --head"
        ) from None


def _node(ray: Any) -> str:
    """Name the node of this process: its address and Ray's id."""
    return f"{ray.util.get_node_ip_address()} (node {ray.get_runtime_context().get_node_id()})"


@contextlib.contextmanager
def _serving(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server beside this process, and pass SIGTERM and Ctrl-C on to it."""
    server = ray_child.start(["serve"], environment(settings, for_worker=False))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, _: server.send_signal(signal.SIGTERM))
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(settings.drain_delay + settings.drain_timeout + _SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            server.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{value:g} {name}" for name, value in resources.items())


def _say(text: str) -> None:
    print(f"tokenyard ray: {text}", flush=True)
