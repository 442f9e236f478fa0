"""One HTTP endpoint of a dialect: reads the body, runs the handler, watches for the client going away.

Knows HTTP and the one rule of errors (a `RequestFailed` is rendered by the dialect, anything else is logged with its
traceback and rendered as INTERNAL). It knows no dialect and no model.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from api_server.errors import ErrorKind, RequestFailed
from api_server.state import ServerState

log = logging.getLogger("tokenyard")

MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass
class Call:
    """One HTTP request as a handler sees it."""

    server: ServerState
    scope: Scope
    body: bytes
    request_id: str
    """The client's x-request-id, or a fresh one; also in the response's header."""
    received: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def path_params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    @cached_property
    def headers(self) -> Headers:
        return Headers(scope=self.scope)

    @cached_property
    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises RequestFailed(BAD_JSON)."""
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise RequestFailed(ErrorKind.BAD_JSON, f"the request body is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise RequestFailed(
                ErrorKind.BAD_JSON, f"the request body must be a JSON object, got {type(value).__name__}"
            )
        return value


Handler = Callable[[Call], Awaitable[Response]]
"""Raises RequestFailed for whatever the client is to be told. When the client goes away it is cancelled."""

ErrorRenderer = Callable[[RequestFailed, Call], Response]


@dataclass(frozen=True)
class Document:
    """What the OpenAPI document says of an endpoint."""

    summary: str
    tag: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    """None: plain text, or nothing."""
    frame: type[BaseModel] | None = None
    """One event of the answer when it is streamed."""
    listed: bool = False
    """The answer is a list of `answer`."""
    example: Mapping[str, Any] | None = None
    """A body that works as it is."""
    errors: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    """Statuses that this endpoint answers in case of an error, with their bodies."""
    description: str = ""
    also: Sequence[Document] = ()
    """What the same path takes and answers in other dialects."""


def endpoint(
    path: str,
    handler: Handler,
    render_error: ErrorRenderer,
    methods: Sequence[str] = ("POST",),
    document: Document | None = None,
) -> Route:
    """A route for `app.py`; `document` is found again as `route.endpoint.document`."""
    return Route(path, Endpoint(handler, render_error, document), methods=list(methods))
