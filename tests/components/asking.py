"""What clients ask of a server that stands behind a proxy."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from tests.attempts import ATTEMPTS

OPERATORS_ROUTES = ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation")
SECONDS = 60.0
# So many that they take much longer than the first one, also on a busy machine.
TOKENS = 1200
PADDING = "x" * 40_000
"""More than the 16 KB that HAProxy and nginx hold in memory unless they are told otherwise."""


def completion(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def long_chat() -> dict[str, Any]:
    """Of forty turns, with a body beyond what a proxy holds in memory."""
    turns = [{"role": ("user", "assistant")[turn % 2], "content": f"This is sentence {turn}."} for turn in range(40)]
    return {"messages": [*turns, {"role": "user", "content": "And now?"}], "max_tokens": 8, "user": PADDING}


def assert_streams_token_by_token(url: str) -> None:
    """A buffer of 4 KB, which is nginx's smallest, always holds a dozen events; a busy machine joins some at times."""
    problems = []
    for _ in range(ATTEMPTS):
        problems.append(_problem_of_a_stream(url))
        if not problems[-1]:
            return
    raise AssertionError(f"no stream came token by token: {problems}")


def _problem_of_a_stream(url: str) -> str:
    """Why a stream did not come token by token; an empty text if it did."""
    began, pieces, first = time.monotonic(), [], 0.0
    with httpx.stream("POST", url + "/v1/completions", json=completion(TOKENS, stream=True), timeout=SECONDS) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for piece in answer.iter_raw():
            first = first or time.monotonic() - began
            pieces.append(piece)
    whole = time.monotonic() - began
    events = b"".join(pieces).decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"]
    if len(events) <= TOKENS / 4:
        return f"{TOKENS} tokens came in {len(events)} events"
    if len(pieces) <= len(events) / 5:
        return f"{len(events)} events came in {len(pieces)} pieces"
    return "" if first < whole * 3 / 4 else f"the first event came after {first:.2f} s of {whole:.2f} s"


def assert_operators_routes_are_closed(url: str) -> None:
    for route in OPERATORS_ROUTES:
        answer = httpx.post(url + route, json={"rid": "somebody-else"}, timeout=SECONDS)
        assert answer.status_code == 403, (route, answer.text)
        assert "--admin-api-key" in answer.text
