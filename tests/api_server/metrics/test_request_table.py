"""The rows of requests, as operators and the page see them."""

from __future__ import annotations

from typing import Any

import httpx

from interfaces import ErrorCode, RequestError
from tests.api_server.conftest import LiveServer


def rows(live: LiveServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(live.url + "/live/requests", timeout=60).json()["requests"]
    return found


def test_one_that_failed_stays_in_the_table(live: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    live.double.refuse = RequestError(ErrorCode.FAILED, "the model is broken")
    failed = httpx.post(live.url + "/v1/completions", json=body, headers={"x-request-id": "broken"}, timeout=60)
    assert failed.status_code == 500
    live.double.refuse = None
    httpx.post(
        live.url + "/v1/completions", json=body, headers={"x-request-id": "whole"}, timeout=60
    ).raise_for_status()
    ours = [(row["id"], row["state"], row["finish"]) for row in rows(live) if row["id"] in ("broken", "whole")]
    assert [(name, state) for name, state, _ in ours] == [("whole", "ended"), ("broken", "failed")]
    assert ours[1][2] == "generation_failed"
