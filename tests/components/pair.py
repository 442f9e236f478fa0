"""Two servers behind a proxy: one dies in the midst of streams, or drains, and no client is the worse for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.components import asking
from tests.kills import kill_together
from tests.system.server import Server

STREAMS = 16
# Tokens of a stream: it takes much longer than the first event of all the others.
LENGTH = 300
# Seconds for which a stream is waited for at most, also on a busy machine.
READ_SECONDS = 240.0


@dataclass
class Pair:
    """The servers by the names that the shipped files give them, and what their streams say when nothing happens."""

    servers: dict[str, Server]
    undisturbed: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start those that do not run."""
        down = [server for server in self.servers.values() if not is_running(server)]
        with ThreadPoolExecutor(len(self.servers)) as threads:
            list(threads.map(Server.__enter__, down))

    def stop(self) -> None:
        running = [server for server in self.servers.values() if is_running(server)]
        with ThreadPoolExecutor(len(self.servers)) as threads:
            list(threads.map(Server.__exit__, running))

    @property
    def ports(self) -> tuple[int, int]:
        first, second = (server.port for server in self.servers.values())
        return first, second

    def lose(self, name: str) -> None:
        """End all processes of a server at once, as the loss of its machine does."""
        server = self.servers[name]
        kill_together([psutil.Process(server.process.pid), *server.children()])
        server.process.wait()


def is_running(server: Server) -> bool:
    return hasattr(server, "process") and server.process.poll() is None


@dataclass
class Stream:
    """One stream of a client that takes it up again when it breaks, wherever the proxy leads."""

    url: str
    number: int
    # Names it among those of other tests.
    group: str
    text: str = ""
    last_id: str = ""
    broken: int = 0
    has_begun: threading.Event = field(default_factory=threading.Event)

    def read(self) -> str:
        deadline = time.monotonic() + READ_SECONDS
        while not self._read_on():
            assert time.monotonic() < deadline, f"stream {self.number} did not end"
            self.broken += 1
            time.sleep(0.2)
        return self.text

    def _read_on(self) -> bool:
        """Whether it has come to its end."""
        headers = {
            "x-resume-stream": "true",
            "x-request-id": f"{self.group}-{self.number}",
            "x-session-id": f"session {self.number}",
            # The same tokens on either server, whatever else runs there.
            "x-deterministic": "true",
        } | ({"last-event-id": self.last_id} if self.last_id else {})
        body = asking.completion(LENGTH, stream=True, prompt=f"{self.number} times", temperature=1, seed=self.number)
        try:
            with httpx.stream(
                "POST", self.url + "/v1/completions", json=body, headers=headers, timeout=asking.SECONDS
            ) as answer:
                if answer.status_code in (502, 503):
                    return False
                assert answer.status_code == 200, answer.read()
                return any(self._take(line) for line in answer.iter_lines())
        except httpx.TransportError:
            return False

    def _take(self, line: str) -> bool:
        """Read one line of the stream. Whether it is the last one."""
        if line.startswith("id:"):
            self._next_id = line.removeprefix("id:").strip()
        elif line == "data: [DONE]":
            return True
        elif line.startswith("data:"):
            event = json.loads(line.removeprefix("data:"))
            assert "error" not in event, event
            self.text += "".join(choice["text"] for choice in event["choices"])
            self.last_id = self._next_id
            self.has_begun.set()
        return False

    _next_id: str = ""


def read_streams(url: str, group: str, disturb: Callable[[Sequence[Stream]], None] = lambda _: None) -> list[Stream]:
    """Read all streams side by side; `disturb` is called while they run."""
    streams = [Stream(url, number, group) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        reading = [threads.submit(stream.read) for stream in streams]
        disturb(streams)
        for each in reading:
            each.result()
    return streams


def assert_streams_outlive_a_server(url: str, pair: Pair, name: str, group: str) -> None:
    """A server is lost under 16 streams: each of them is taken up at the other one, to the same end."""

    def lose(streams: Sequence[Stream]) -> None:
        for stream in streams:
            assert stream.has_begun.wait(READ_SECONDS)
        pair.lose(name)

    streams = read_streams(url, group, lose)
    assert [stream.text for stream in streams] == pair.undisturbed
    broken = sum(stream.broken > 0 for stream in streams)
    assert 0 < broken < STREAMS, "each server had some of them"
    statuses = {httpx.post(url + "/v1/completions", json=asking.completion(1)).status_code for _ in range(8)}
    assert statuses == {200}


@dataclass
class Crowd:
    """Clients with kept connections, with small bodies, bodies beyond 16 KB, and streams, until they are stopped."""

    url: str
    answers: int = 0
    lost: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def ask(self, nth: int) -> None:
        body: dict[str, Any] = asking.completion(2)
        if nth % 3 == 0:
            body["user"] = asking.PADDING
        elif nth % 3 == 1:
            body |= {"stream": True, "max_tokens": 60}
        with httpx.Client(timeout=asking.SECONDS, headers={"x-session-id": f"client {nth}"}) as client:
            while not self.stopped.wait(0.1):
                try:
                    answer = client.post(self.url + "/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.lost.append(f"client {nth}: {error!r}")
                    continue
                whole = answer.status_code == 200 and (not body.get("stream") or answer.text.endswith("[DONE]\n\n"))
                if whole:
                    self.answers += 1
                else:
                    self.lost.append(f"client {nth}: {answer.status_code} {answer.text[-200:]}")


def assert_a_restart_loses_nothing(url: str, pair: Pair, name: str, wait_until_up: Callable[[], None]) -> None:
    """A server is stopped in order and started again while clients ask."""
    crowd = Crowd(url)
    server = pair.servers[name]
    with ThreadPoolExecutor(6) as threads:
        clients = [threads.submit(crowd.ask, nth) for nth in range(6)]
        try:
            wait_until_up()
            server.__exit__()
            assert server.process.returncode == 0, server.log.read_text()
            before = crowd.answers
            server.__enter__()
            wait_until_up()
            assert crowd.answers > before
        finally:
            crowd.stopped.set()
        for client in clients:
            client.result()
    assert not crowd.lost, crowd.lost[:10]
