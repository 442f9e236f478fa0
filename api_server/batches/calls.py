"""A request from within the process: through the same routes as one from the network, without a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from interfaces import LOWEST_PRIORITY
from shared import logs
from shared.access_keys import Caller


@dataclass
class Answer:
    """A whole answer. `body` is JSON, or None where it was none."""

    request_id: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None

    @property
    def comes_again(self) -> bool:
        """True when the server could not serve the request now, which says nothing about the request."""
        return self.status in (0, 429, 503, 529)


def failed(request_id: str, status: int, kind: str, message: str) -> Answer:
    """An answer that no route has given, in a form that all dialects' clients read."""
    error = {"message": message, "type": kind, "param": None, "code": None}
    return Answer(request_id, status, {}, {"type": "error", "error": error})


async def call(
    app: ASGIApp,
    server: object,
    caller: Caller,
    request_id: str,
    path: str,
    body: Mapping[str, Any],
    *,
    seconds: int,
) -> Answer:
    """Sends a request of the lowest priority that has so many seconds, and returns its answer."""
    # A task has its own context: what a request leaves there must not reach another.
    return await asyncio.create_task(_call(app, server, caller, request_id, path, body, seconds))


async def _call(
    app: ASGIApp, server: object, caller: Caller, request_id: str, path: str, body: Mapping[str, Any], seconds: int
) -> Answer:
    logs.of_request.set({"request_id": request_id})
    data = orjson.dumps(body)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(data)),
        "x-request-priority": str(LOWEST_PRIORITY),
        "x-request-timeout": str(seconds),
    }
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "http_version": "1.1",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": {"server": server, "request_id": request_id, "caller": caller},
    }
    sent = False
    answer = Answer(request_id)
    received = bytearray()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}
        await asyncio.Event().wait()  # a client that never leaves
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            received.extend(message.get("body", b""))

    await app(scope, receive, send)
    with contextlib.suppress(orjson.JSONDecodeError):
        answer.body = orjson.loads(received)
    return answer
