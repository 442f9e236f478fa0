"""The short form of `make chaos`: one server, a wave of streams for each kind of disaster, every byte compared."""

from __future__ import annotations

import re
import signal
import time

import psutil
import pytest

from tests.attempts import ATTEMPTS
from tests.chaos.streams import Heard, Request
from tests.chaos.waves import (
    Disturbance,
    both,
    compare,
    kill,
    kill_again_while_it_loads,
    once_tokens_come,
    run,
)
from tests.system.server import Server
from tests.system.test_resilience import LONG, last_frame, open_stream, used_blocks

# Seconds; a wave takes half a second and more.
MID_WAVE = 0.25

GIVEN_UP = re.compile(r"was silent for 5 s; (\d+) requests cancelled")
SUBMITTED_AGAIN = re.compile(r"the scheduler had given this process up: submitting (\d+) open requests again")


@pytest.mark.parametrize(
    ("disturb", "after"),
    [
        (kill("model_worker"), MID_WAVE),
        (kill("model_worker"), 0.05),
        (kill("scheduler"), MID_WAVE),
        (both(kill("model_worker"), kill("scheduler")), MID_WAVE),
    ],
    ids=["worker", "worker in prefill", "scheduler", "both"],
)
def test_a_killed_process_is_only_a_pause(
    server: Server, asked: list[Request], undisturbed: list[Heard], disturb: Disturbance, after: float
) -> None:
    outcome = compare(asked, undisturbed, run(server, asked, disturb, after))
    assert outcome.clean, f"{outcome}\n{server.log.read_text()[-5000:]}"
    server.wait_for("all blocks are free", 60, lambda: used_blocks(server) == 0)


def test_an_api_process_that_stands_still_is_only_a_pause(
    server: Server, asked: list[Request], undisturbed: list[Heard]
) -> None:
    """The scheduler gives its requests up after five seconds of silence, and must say so when it speaks again.

    Generation pauses meanwhile: otherwise the streams would end before they are given up.
    """
    log = 0

    def told() -> str:
        return server.log.read_text()[log:]

    def stand_still(_: Server) -> None:
        server.post("/pause_generation", {"mode": "in_place"})
        process = server.child("api_server")
        process.suspend()
        try:
            server.wait_for("the process is given up", 60, lambda: GIVEN_UP.search(told()))
        finally:
            process.resume()
            server.post("/continue_generation", {})

    # On a busy machine the streams may end before generation pauses: then there is nothing to give up.
    for _ in range(ATTEMPTS):
        log = len(server.log.read_text())
        outcome = compare(asked, undisturbed, run(server, asked, once_tokens_come(stand_still)))
        assert outcome.clean, f"{outcome}\n{told()[-5000:]}"
        given_up = GIVEN_UP.search(told())
        assert given_up, told()[-5000:]
        if (count := int(given_up[1])) > 0:
            break
    submitted = SUBMITTED_AGAIN.search(told())
    assert submitted, told()[-5000:]
    assert count == int(submitted[1]) > 0
    server.wait_for("all blocks are free", 60, lambda: used_blocks(server) == 0)


def test_a_stopped_worker_is_noticed_named_and_replaced(
    server: Server, asked: list[Request], undisturbed: list[Heard]
) -> None:
    stop = once_tokens_come(kill("model_worker", number=signal.SIGSTOP))
    outcome = compare(asked, undisturbed, run(server, asked, stop))
    assert outcome.clean, f"{outcome}\n{server.log.read_text()[-5000:]}"
    # On a busy machine another step may have taken too long before.
    line = [line for line in server.log.read_text().splitlines() if "stalled: the step has taken" in line][-1]
    for fact in (
        "worker 0 (cpu, epoch",
        "in step ",
        "with rows [",
        "of requests ",
        'last Python frame: File "',
        "killed",
    ):
        assert fact in line


def test_a_worker_that_dies_again_while_it_loads(
    second: Server, asked: list[Request], undisturbed: list[Heard]
) -> None:
    outcome = compare(asked, undisturbed, run(second, asked, kill_again_while_it_loads, MID_WAVE))
    assert outcome.clean, f"{outcome}\n{second.log.read_text()[-5000:]}"
    assert second.log.read_text().count("died after") == 2
    second.wait_for("all blocks are free", 60, lambda: used_blocks(second) == 0)


def test_sighup_restarts_one_by_one_and_nobody_notices(
    second: Server, asked: list[Request], undisturbed: list[Heard]
) -> None:
    before, log = {child.pid for child in second.children()}, len(second.log.read_text())

    def told() -> str:
        return second.log.read_text()[log:]

    def hang_up(_: Server) -> None:
        second.process.send_signal(signal.SIGHUP)

    outcome = compare(asked, undisturbed, run(second, asked, hang_up, MID_WAVE))
    assert outcome.clean, f"{outcome}\n{told()}"
    second.wait_for("everyone is restarted", 90, lambda: told().count("was restarted") == 2)
    for index in (0, 1):
        assert f"api_server:{index} was restarted" in told()
    assert "died" not in told()
    second.wait_for("the old ones have left", 30, lambda: second.count("api_server") == 2)
    left = before & {child.pid for child in second.children()}
    assert {second.child(name).pid for name in ("scheduler", "model_worker")} <= left
    assert not {second.child("api_server", nth).pid for nth in (0, 1)} & before


def test_a_server_works_whatever_pythonoptimize_says(second: Server) -> None:
    assert psutil.Process(second.process.pid).environ()["PYTHONOPTIMIZE"] == "2"
    answer = second.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3}})
    assert answer["meta_info"]["completion_tokens"] == 3
    assert second.child("model_worker").environ()["PYTHONOPTIMIZE"] == ""


def test_streams_end_at_once_when_the_supervisor_is_killed(second: Server) -> None:
    """The last test of this server. Nothing more would come, and its processes need not wait for the drain timeout."""
    children = second.children()
    streams = [
        open_stream(second, {"text": f"Hello {n}", "sampling_params": LONG | {"max_new_tokens": 2000}, "stream": True})
        for n in range(4)
    ]
    for _, response in streams:
        assert response.readline().startswith(b"data: {")
    second.process.kill()
    second.process.wait()
    killed = time.monotonic()
    for connection, response in streams:
        frame = last_frame(response)
        assert "being stopped" in frame["error"]["message"], frame
        connection.close()
    assert time.monotonic() - killed < 10
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
