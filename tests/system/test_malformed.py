"""Bodies that are wrong in random ways, to each route: every one is answered in time with the dialect's error, and then
the server is as it was.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.strange_bodies import check_error, send_to_every_route
from tests.system.fuzz import LONG, MEETINGS, PAUSES, Unharmed, go_on
from tests.system.server import Server

BODIES = LONG or 25
"""For each route."""

SECONDS = 60.0


@pytest.fixture(scope="module", autouse=True)
def unharmed(target: Server) -> Iterator[None]:
    with Unharmed(target):
        yield


LONG_TEXT = "a b" * (10 << 18)
MESSAGE = {"role": "user", "content": LONG_TEXT}
SHORT = {"role": "user", "content": "x"}
LONG_TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"inputs": LONG_TEXT}),
    ("/tokenize", {"prompt": LONG_TEXT}),
    ("/v1/tokenize", {"prompt": [LONG_TEXT[: 1 << 18]] * 8}),
    ("/v1/tokenize", {"messages": [MESSAGE]}),
    ("/chat_tokenize", {"messages": [MESSAGE]}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [MESSAGE]}),
    ("/generate", {"inputs": LONG_TEXT, "parameters": {"truncate": 10}}),
    ("/generate", {"text": "x", "sampling_params": {"stop": LONG_TEXT}}),
    ("/generate", {"inputs": "x", "parameters": {"stop": [LONG_TEXT]}}),
    ("/v1/completions", {"prompt": "x", "stop": LONG_TEXT}),
    ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [SHORT], "stop_sequences": [LONG_TEXT]}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(LONG_TEXTS)))
def test_a_text_beyond_all_bounds_is_refused(target: Server, case: int) -> None:
    path, sent = LONG_TEXTS[case]
    if "model" in sent:
        assert target.model is not None
        sent = sent | {"model": target.model.name}
    response = httpx.post(target.url + path, json=sent, timeout=SECONDS)
    assert response.status_code in (400, 422), response.text[:500]
    check_error(path, response)
    assert "at most" in response.text or "must be <=" in response.text


def test_every_malformed_body_gets_an_answer(target: Server) -> None:
    with urllib.request.urlopen(target.url + "/openapi.json", timeout=90) as response:
        document = json.load(response)
    with httpx.Client(base_url=target.url, timeout=SECONDS) as client:
        answered = send_to_every_route(
            client, document, BODIES, MEETINGS, lambda path: go_on(target) if path in PAUSES else None
        )
    assert answered[200] > 0
    assert answered[400] > BODIES, answered
