"""The frames of `tokenyard top`: rates between two answers of /live, and what is unknown stays empty."""

from __future__ import annotations

import io
from collections import deque
from typing import Any

from rich.console import Console

from deploy.top import Frames, bars


def process(name: str, at: float, generated: int, since: float = 0.0, first: float = 12.0) -> dict[str, Any]:
    return {
        "replica": name,
        "time": at,
        "since": since,
        "totals": {"generated": generated, "prompt": 200, "cached": 50},
        "first_token_ms": {"p50": first, "p99": 34.0},
        "between_tokens_ms": None,
    }


def facts(at: float, generated: int, **more: Any) -> dict[str, Any]:
    worker = {
        "index": 0,
        "device": "cpu",
        "backend": "fused",
        "epoch": 1,
        "running": 2,
        "steps": int(10 * at),
        "blocks_used": 30,
        "blocks_total": 60,
        "blocks_cached": 6,
        "seconds_since_step": 0.0,
    }
    replica = process("api_server:0", at, generated)
    return {
        "time": at,
        "replica": "api_server:0",
        "replicas": [replica],
        "model": "m",
        "version": "1",
        "ready": True,
        "reason": "",
        "totals": replica["totals"],
        "first_token_ms": replica["first_token_ms"],
        "between_tokens_ms": None,
        "scheduler": {"running": 2, "waiting": 3, "counters": {"finished": 7, "failed": 0}, "workers": [worker]},
    } | more


def shown(frames: Frames, now: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(frames.frame(now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name))


def test_rates_are_made_of_two_answers() -> None:
    frames = Frames()
    first = shown(frames, facts(1.0, 100))
    assert row(first, "output tok/s") == ["output", "tok/s"]
    second = shown(frames, facts(3.0, 180))
    assert row(second, "output tok/s")[2] == "40"
    assert row(second, "waiting")[1] == "3"
    assert row(second, "prefix hits")[2] == "25"
    assert row(second, "0 (epoch 1)")[-4:] == ["50", "%", "10", "%", "10"][-4:]
    assert "7 finished" in second
    assert "failed" not in second


def test_all_processes_are_added_up() -> None:
    """Whichever of them answers, and however old its view of the others is."""
    frames = Frames()
    ones = [process("api_server:0", 1.0, 100), process("api_server:1", 0.5, 300, first=20.0)]
    shown(frames, facts(1.0, 0, replicas=ones))
    ones = [process("api_server:0", 2.0, 140), process("api_server:1", 1.5, 310, first=20.0)]
    text = shown(frames, facts(2.0, 0, replicas=ones, replica="api_server:1"))
    assert "2 API processes" in text
    assert row(text, "output tok/s")[2] == "50"
    assert row(text, "first token")[2:] == ["20.0", "ms,", "p99", "34.0"]
    assert row(text, "api_server:0")[1] == "40"
    assert row(text, "api_server:1")[1] == "10"
    # The second has written nothing since; then it is known to be idle.
    ones = [process("api_server:0", 3.0, 140), ones[1]]
    assert row(shown(frames, facts(3.0, 0, replicas=ones)), "output tok/s")[2] == "10"
    ones = [process("api_server:0", 5.0, 140), ones[1]]
    assert row(shown(frames, facts(5.0, 0, replicas=ones)), "output tok/s")[2] == "0"


def test_a_process_that_was_started_again_counts_from_zero() -> None:
    frames = Frames()
    shown(frames, facts(1.0, 100))
    for at, since, expected in ((2.0, 1.5, "0"), (3.0, 1.5, "0")):
        now = facts(at, 0, replicas=[process("api_server:0", at, 10, since)])
        assert row(shown(frames, now), "output tok/s")[2] == expected


def test_a_silent_scheduler_is_said() -> None:
    frames = Frames()
    shown(frames, facts(1.0, 100))
    text = shown(frames, facts(2.0, 100, scheduler=None, ready=False, reason="the scheduler is silent"))
    assert "not ready: the scheduler is silent" in text
    assert "restarted, or stuck" in text
    assert row(shown(frames, facts(3.0, 100)), "running")[1] == "2"


def test_bars() -> None:
    assert bars(deque()) == ""
    assert bars(deque([0.0, 0.0])) == "  "
    assert bars(deque([1.0, 8.0, 0.0])) == "▁█ "
