"""The real process: `python -m api_server`, its start, its memory, its end."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from shared.access_keys import digest_of
from shared.endpoints import RunDirectory
from shared.phases import STATUS_FD
from shared.settings import Settings
from tests.api_server.scheduler_double import SchedulerDouble
from tests.attempts import quickest


class Process:
    def __init__(self, run_directory: RunDirectory, index: int, listener: socket.socket) -> None:
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        reader, writer = os.pipe()
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "api_server", "--run-dir", str(run_directory.path)),
                *("--index", str(index), "--listener", str(listener.fileno())),
            ],
            env=os.environ | {STATUS_FD: str(writer)},
            pass_fds=[writer, listener.fileno()],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writer)
        self.events = os.fdopen(reader)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)

    def wait_ready(self) -> list[dict[str, str]]:
        seen = []
        for line in self.events:
            seen.append(json.loads(line))
            if seen[-1]["event"] == "ready":
                break
        return seen


@contextmanager
def started(run_directory: RunDirectory, listener: socket.socket, index: int = 0) -> Iterator[Process]:
    process = Process(run_directory, index, listener)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait(60)
        process.events.close()


@contextmanager
def listening(run_directory: RunDirectory, model_directory: Path) -> Iterator[socket.socket]:
    """The supervisor's socket, whose port the settings name."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        settings = Settings(model=str(model_directory), port=made.getsockname()[1])
        run_directory.settings_file.write_text(settings.to_json())
        yield made


@pytest.fixture
def listener(run_directory: RunDirectory, model_directory: Path) -> Iterator[socket.socket]:
    """The supervisor's socket."""
    with listening(run_directory, model_directory) as made:
        yield made


def test_starts_quickly_and_small_and_without_torch(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    with started(run_directory, listener) as process:
        events = process.wait_ready()
        assert [event.get("name") for event in events] == ["import", "load tokenizer", None]
        assert events[-1]["url"] == process.url
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)
        answer = httpx.post(f"{process.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
        live = psutil.Process(process.popen.pid)
        assert live.memory_info().rss < 300e6
        assert not [mapped.path for mapped in live.memory_maps() if "/site-packages/torch/" in mapped.path]
        assert "api_server:0" in " ".join(live.cmdline())
        assert "-m api_server" in " ".join(live.cmdline())
        # It may have work left from its start.
        assert quickest(lambda: seconds_computed(live), below=0.05) < 0.05


def seconds_computed(process: psutil.Process) -> float:
    """Processor time of a process in one second."""
    before = process.cpu_times()
    time.sleep(1)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system)


def test_replicas_share_the_port(run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble) -> None:
    with started(run_directory, listener, 0) as first, started(run_directory, listener, 1) as second:
        first.wait_ready()
        second.wait_ready()
        double.wait(lambda: len(double._replicas) == 2)
        for process in (first, second):
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(60) == 0
            assert httpx.get(first.url).status_code == 200 if process is first else True
        assert len(double.goodbyes) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_says_goodbye(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble, number: signal.Signals
) -> None:
    double.step_seconds = 0.01
    double.answer = lambda _: [40]
    with started(run_directory, listener) as process:
        process.wait_ready()
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)
        body = {"prompt": "x", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=90) as response:
            lines = response.iter_lines()
            next(lines)
            double.hold.set()
            listener.close()  # as the supervisor does
            process.popen.send_signal(number)
            double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 503)
            double.hold.clear()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.popen.wait(60) == 0
        double.wait(lambda: len(double.goodbyes) == 1)


def test_what_still_runs_after_the_drain_ends_with_its_error(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    settings = json.loads(run_directory.settings_file.read_text())
    run_directory.settings_file.write_text(json.dumps(settings | {"drain_timeout": 1}))
    double.step_seconds = 0.05
    double.answer = lambda _: [40]
    with started(run_directory, listener) as process:
        process.wait_ready()
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)
        body = {"prompt": "x", "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=90) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert told[-1]["error"]["code"] == "unavailable"
        assert "being stopped" in told[-1]["error"]["message"]
        assert 1 < len(told) < 200
        assert process.popen.wait(60) == 0
        double.wait(lambda: len(double.goodbyes) == 1)


def ask(connection: http.client.HTTPConnection, path: str = "/v1/completions") -> http.client.HTTPResponse:
    """A request on a connection that is kept."""
    body = json.dumps({"prompt": "x", "max_tokens": 2})
    if path == "/ready":
        connection.request("GET", path)
    else:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_kept_connection_is_served_once_more_and_ends_with_its_answer(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble, number: signal.Signals
) -> None:
    with started(run_directory, listener) as process:
        process.wait_ready()
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)
        kept = [process.connection() for _ in range(2)]
        answers = [ask(connection) for connection in kept]
        assert [answer.getheader("connection") for answer in answers] == [None, None]
        listener.close()
        process.popen.send_signal(number)
        # The signal may come after the next request.
        while ask(kept[0]).getheader("connection") != "close":
            pass
        last = ask(kept[1])
        assert (last.status, last.getheader("connection")) == (200, "close")
        double.wait(lambda: _refused(process.url))
        assert process.popen.wait(60) == 0


def test_requests_are_served_during_the_delay_while_the_server_is_not_ready(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    settings = json.loads(run_directory.settings_file.read_text())
    run_directory.settings_file.write_text(json.dumps(settings | {"drain_delay": 5}))
    with started(run_directory, listener) as process:
        process.wait_ready()
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)
        listener.close()
        process.popen.send_signal(signal.SIGTERM)
        told = time.monotonic()
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 503)
        for _ in range(3):
            answer = httpx.post(f"{process.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            assert httpx.get(f"{process.url}/health").status_code == 200
        double.wait(lambda: _refused(process.url))
        assert process.popen.wait(60) == 0
        assert time.monotonic() - told >= 5


def test_without_clients_it_ends_at_once(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    def seconds_to_end() -> float:
        with started(run_directory, listener) as process:
            process.wait_ready()
            double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)
            process.popen.send_signal(signal.SIGTERM)
            told = time.monotonic()
            assert process.popen.wait(60) == 0
            return time.monotonic() - told

    assert quickest(seconds_to_end, below=1.5) < 1.5


def test_a_client_that_is_silent_keeps_the_door_open_until_it_has_been_so_for_a_while(
    run_directory: RunDirectory, model_directory: Path, double: SchedulerDouble
) -> None:
    def seconds_open() -> float:
        with listening(run_directory, model_directory) as listener, started(run_directory, listener) as process:
            process.wait_ready()
            double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)
            kept = process.connection()
            assert ask(kept).status == 200
            listener.close()
            process.popen.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 503)
            body = {"prompt": "x", "max_tokens": 2}
            assert httpx.post(f"{process.url}/v1/completions", json=body).status_code == 200
            while not _refused(process.url):  # probes are no requests
                time.sleep(0.05)
            taken = time.monotonic() - asked
            assert taken >= 2
            assert process.popen.wait(60) == 0
            return taken

    # With requests it would have stayed for five seconds.
    assert quickest(seconds_open, below=4.8) < 4.8


def test_whatever_gets_a_connection_to_a_server_that_is_stopped_is_served(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    with started(run_directory, listener) as process, ThreadPoolExecutor(8) as threads:
        process.wait_ready()
        double.wait(lambda: "-m api_server.constraints.compile_process" in _children(process))
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)

        def until_refused() -> list[int]:
            """One connection for each request."""
            found: list[int] = []
            while True:
                connection = process.connection()
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    return found
                found.append(ask(connection).status)
                connection.close()

        clients = [threads.submit(until_refused) for _ in range(8)]
        listener.close()
        process.popen.send_signal(signal.SIGTERM)
        told = time.monotonic()
        answers = [client.result() for client in clients]
        assert time.monotonic() - told > 4, "they did not let it go, and it ended all the same"
        assert all(set(statuses) == {200} for statuses in answers)
        assert process.popen.wait(60) == 0


def test_the_next_process_opens_the_door_of_one_that_was_ended(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    """The socket, which the supervisor holds, may still ignore new connections."""
    with started(run_directory, listener) as process:
        process.wait_ready()
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 0
    with started(run_directory, listener) as process:
        process.wait_ready()
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)


def _children(process: Process) -> str:
    return "\n".join(" ".join(child.cmdline()) for child in psutil.Process(process.popen.pid).children())


def test_one_that_retires_is_ready_until_its_last_stream_has_ended(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    settings = json.loads(run_directory.settings_file.read_text())
    run_directory.settings_file.write_text(json.dumps(settings | {"drain_timeout": 1}))
    double.step_seconds = 0.15
    double.answer = lambda _: [40]
    with started(run_directory, listener) as old, httpx.Client(timeout=90) as client:
        old.wait_ready()
        kept = old.connection()  # before there is another one to accept it
        double.wait(lambda: ask(kept, "/ready").status == 200)
        body = {"prompt": "x", "max_tokens": 100, "stream": True}
        stream = client.build_request("POST", f"{old.url}/v1/completions", json=body)
        response = client.send(stream, stream=True)
        lines = response.iter_lines()
        next(lines)
        with started(run_directory, listener, 1) as new:
            new.wait_ready()
            old.popen.send_signal(signal.SIGQUIT)
            time.sleep(0.5)
            answer = ask(kept, "/ready")
            assert (answer.status, answer.getheader("connection")) == (200, "close")
            double.step_seconds = 0.0
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert old.popen.wait(60) == 0
            double.wait(lambda: httpx.get(f"{new.url}/ready").status_code == 200)


def _refused(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return True
    return False


def test_keys_are_exchanged_by_a_signal_and_streams_go_on(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble
) -> None:
    settings = Settings.read(run_directory.settings_file)
    locked = dataclasses.replace(settings, api_key=digest_of("old"))
    run_directory.settings_file.write_text(locked.to_json())
    double.step_seconds = 0.02
    double.answer = lambda _: [40]
    with started(run_directory, listener) as process:
        process.wait_ready()
        double.wait(lambda: httpx.get(f"{process.url}/ready").status_code == 200)

        def status(key: str) -> int:
            return httpx.get(f"{process.url}/v1/models", headers={"x-api-key": key}).status_code

        def turn_to(text: str) -> None:
            run_directory.settings_file.write_text(text)
            process.popen.send_signal(signal.SIGHUP)

        assert (status("old"), status("new")) == (200, 401)
        body = {"prompt": "x", "max_tokens": 60, "stream": True}
        headers = {"x-api-key": "old"}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, headers=headers, timeout=90) as response:
            lines = response.iter_lines()
            next(lines)
            turn_to(dataclasses.replace(settings, api_key=digest_of("new")).to_json())
            double.wait(lambda: status("new") == 200)
            assert status("old") == 401
            assert [line for line in lines if line][-1] == "data: [DONE]"
        turn_to('{"cut')
        time.sleep(0.2)
        assert (status("old"), status("new")) == (401, 200)


def test_a_renewed_certificate_is_shown_to_the_next_connection(
    run_directory: RunDirectory, listener: socket.socket, double: SchedulerDouble, tmp_path: Path
) -> None:
    file, old, new = tmp_path / "server.pem", trustme.CA(), trustme.CA()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/v1/models"

    def issue(authority: trustme.CA) -> None:
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))

    def trusts(authority: trustme.CA) -> bool:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        try:
            return httpx.get(url, verify=context).status_code == 200
        except httpx.ConnectError:
            return False

    settings = Settings.read(run_directory.settings_file)
    run_directory.settings_file.write_text(dataclasses.replace(settings, ssl_certfile=str(file)).to_json())
    issue(old)
    with started(run_directory, listener) as process:
        process.wait_ready()
        double.wait(lambda: trusts(old))
        context = ssl.create_default_context()
        old.configure_trust(context)
        with httpx.Client(verify=context) as kept:
            assert kept.get(url).status_code == 200
            issue(new)
            process.popen.send_signal(signal.SIGHUP)
            double.wait(lambda: trusts(new))
            assert not trusts(old)
            assert kept.get(url).status_code == 200  # its connection is still there
        file.write_text("no PEM")
        process.popen.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert trusts(new)


def test_a_model_without_tokenizer_is_fatal(
    run_directory: RunDirectory, listener: socket.socket, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    settings = json.loads(run_directory.settings_file.read_text())
    run_directory.settings_file.write_text(json.dumps(settings | {"model": str(empty)}))
    with started(run_directory, listener) as process:
        events = [json.loads(line) for line in process.events]
        assert events[-1]["event"] == "fatal"
        assert process.popen.wait(60) == 1
