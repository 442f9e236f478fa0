"""One HTTP endpoint of a dialect: reads the body, runs the handler, watches for the client going away.

Knows HTTP and the one rule of errors (a `RequestFailed` is rendered by the dialect, anything else is logged with its
traceback and rendered as INTERNAL). It knows no dialect and no model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from api_server.body.bodies import MAX_BODY_BYTES, Held
from api_server.engine import resume, scheduling
from api_server.engine.resume import Resume
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.state import ServerState
from shared.access_keys import Caller

log = logging.getLogger("tokenyard")

T = TypeVar("T")

# Most levels of a body: code that writes parts of it again goes no deeper than 254.
DEEPEST = 200
# A body over the limit is read up to here and thrown away: a client that is still sending would not see the answer.
_MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES


@dataclass
class Call:
    """One HTTP request for a handler."""

    server: ServerState
    scope: Scope
    body: bytes | bytearray
    # The client's x-request-id, or a fresh one; also in the response's header.
    request_id: str
    received: float = field(default_factory=time.monotonic)
    # True when the body may carry scheduling options (`scheduling.py`).
    generates: bool = False
    # Bytes of the body.
    size: int = 0
    # True when the body is small enough to be read on the event loop.
    light: bool = True

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def caller(self) -> Caller:
        caller: Caller = self.scope["state"]["caller"]
        return caller

    @property
    def path_params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    @cached_property
    def headers(self) -> Headers:
        return Headers(scope=self.scope)

    async def apart(self, job: Callable[[], T]) -> T:
        """Runs work that grows with the body; for a large body in a thread, which shares the lock."""
        return job() if self.light else await self.server.bodies.apart(job)

    @cached_property
    def json(self) -> dict[str, Any]:
        """The body as a JSON object; without a content type it is taken for JSON. Raises RequestFailed."""
        if isinstance(self.parsed, RequestFailed):
            raise self.parsed
        if self.generates:
            self._read_scheduling(scheduling.take(self.parsed))
        return self.parsed

    @cached_property
    def parsed(self) -> dict[str, Any] | RequestFailed:
        """The result of `json`, or its error. Parsed once, also if that fails; the text is released then."""
        try:
            return self._parse()
        except RequestFailed as error:
            return RequestFailed(error.kind, error.message)  # a new error: the old one's traceback holds the whole text
        finally:
            self.body = b""

    def _parse(self) -> dict[str, Any]:
        self._check_media_type()
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise RequestFailed(ErrorKind.BAD_JSON, f"the request body is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise RequestFailed(ErrorKind.BAD_JSON, f"the request body must be a JSON object, got {_kind(value)}")
        if self.body.count(b"[") + self.body.count(b"{") > DEEPEST and _deeper(value, DEEPEST):
            raise invalid(f"the request body is nested deeper than {DEEPEST} levels")
        return value

    def _check_media_type(self) -> None:
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            what = f"Content-Encoding: a body that is coded with {coding[:100]!r} is not read; send it as it is"
            raise RequestFailed(ErrorKind.BAD_MEDIA_TYPE, what)
        declared = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A form of any page can send a body without a type: no browser has checked that the page may send it.
        may_be_left_out = "origin" not in self.headers
        if declared == "application/json" or declared.endswith("+json") or (may_be_left_out and not declared):
            return
        what = f"Unsupported Media Type: the content type must be application/json, got {declared[:100]!r}"
        raise RequestFailed(ErrorKind.BAD_MEDIA_TYPE, what)

    def _read_scheduling(self, fields: Mapping[str, Any]) -> None:
        may_hurry = self.caller.admin or not self.server.keys.users
        scheduling.current.set(scheduling.options_of(self.headers, fields, self.caller, may_hurry))
        self.scope["state"]["resume"] = wanted = Resume.wanted(self.headers, self.request_id)
        resume.current.set(wanted)


def _kind(value: Any) -> str:
    """JSON's name for the type of a value that is no object."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case list():
            return "an array"
    return "a number"


def _deeper(value: Any, levels: int) -> bool:
    """True when lists and objects are nested deeper than `levels`."""
    layer = [value]
    for _ in range(levels):
        inner = (part.values() if isinstance(part, dict) else part for part in layer)
        layer = [item for part in inner for item in part if isinstance(item, dict | list)]
        if not layer:
            return False
    return True


# Raises RequestFailed with the error for the client. It is cancelled when the client goes away.
Handler = Callable[[Call], Awaitable[Response]]

ErrorRenderer = Callable[[RequestFailed, Call], Response]


@dataclass(frozen=True)
class Document:
    """An endpoint's entry in the OpenAPI document."""

    summary: str
    tag: str
    body: type[BaseModel] | None = None
    # The model of the answer; None for plain text or an empty answer.
    answer: type[BaseModel] | None = None
    # One event of the answer when it is streamed.
    frame: type[BaseModel] | None = None
    # The answer is a list of `answer`.
    listed: bool = False
    # A body that works unchanged.
    example: Mapping[str, Any] | None = None
    # Error statuses of this endpoint, with the models of their bodies.
    errors: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    description: str = ""
    # Documents of other dialects on the same path.
    also: Sequence[Document] = ()
    # True when text is generated although no answer can be streamed (a streamed answer implies it).
    generates: bool = False
    # True when vectors or scores of texts are computed.
    pools: bool = False

    @property
    def generating(self) -> bool:
        """True when text is generated."""
        return self.generates or self.frame is not None

    @property
    def family(self) -> bool | None:
        """The models that all documents of this path are for: True if they pool, False if they generate, else None."""
        families = {found.pools for found in (self, *self.also) if found.pools or found.generating}
        return families.pop() if len(families) == 1 else None


def endpoint(
    path: str,
    handler: Handler,
    render_error: ErrorRenderer,
    methods: Sequence[str] = ("POST",),
    document: Document | None = None,
) -> Route:
    """Makes a route for `app.py`; `document` is found again as `route.endpoint.document`."""
    return Route(path, Endpoint(handler, render_error, document), methods=list(methods))


class Endpoint:
    """The ASGI application of one route. `app.py` puts `server`, `request_id` and `caller` into `scope["state"]`."""

    def __init__(self, handler: Handler, render_error: ErrorRenderer, document: Document | None) -> None:
        self.document = document
        self._handler = handler
        self._family = document.family if document is not None else None
        self.render_error = render_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        generates = self.document is not None and (self.document.generating or self.document.pools)
        call = Call(state["server"], scope, b"", state["request_id"], generates=generates)
        with call.server.bodies.hold() as held:
            await self._answer(call, held, receive, send)

    async def _answer(self, call: Call, held: Held, receive: Receive, send: Send) -> None:
        failure: RequestFailed | None = None
        try:
            call.body = await _read_body(receive, held)
            await held.weigh(call.body)
            call.size = len(call.body)
            call.light = held.light
        except RequestFailed as error:
            failure = error
            call.body = b""
        except ClientGone:
            return
        client = _Client(receive, send)
        # Not an attribute of the client: a cancelled task keeps its frames, which would keep the task.
        watcher = asyncio.create_task(client.watch())
        try:
            response = self._fail(failure, call) if failure else await self._respond(call)
            await response(call.scope, receive, client.send)
        except asyncio.CancelledError:
            if not client.gone:
                raise
            client.task.uncancel()
            log.info("client went away: request %s on %s is cancelled", call.request_id, call.path)
        finally:
            watcher.cancel()

    async def _respond(self, call: Call) -> Response:
        try:
            if call.server.others:
                await self._choose_model(call)
            if self._family is not None:
                call.server.check_family(self._family)
            if not call.light:
                await call.apart(lambda: call.parsed)
                # SchedulingOptions belong to this task, not to the thread in which a handler may have the body read.
                _ = call.generates and call.json
            return await self._handler(call)
        except RequestFailed as error:
            return self._fail(error, call)
        except Exception:
            log.exception("request %s on %s failed by an error of ours", call.request_id, call.path)
            return self._fail(internal_error(call.request_id), call)

    async def _choose_model(self, call: Call) -> None:
        """Makes `call.server` the state of the model that the request is for."""
        named = call.path_params.get("model")
        if named is None and call.size:
            parsed = await call.apart(lambda: call.parsed)
            named = parsed.get("model") if isinstance(parsed, dict) else None
        call.server = call.server.of_model(named, self._family)

    def _fail(self, error: RequestFailed, call: Call) -> Response:
        call.server.record_failure(call.path, error)
        return self.render_error(error, call)


class ClientGone(Exception):
    """The connection ended before the request was complete."""


def internal_error(request_id: str) -> RequestFailed:
    """The error that a client gets for a bug; the traceback stays in the log."""
    return RequestFailed(
        ErrorKind.INTERNAL, f"internal error; the server's log has the details of request {request_id}"
    )


async def discard_body(scope: Scope, receive: Receive) -> None:
    """Reads a request that is refused by its head to its end.

    A connection that is closed with bytes unread is reset, and the client may lose the answer. A client that expects
    100 Continue has sent no body.
    """
    if any(name == b"expect" for name, _ in scope["headers"]):
        return
    size = 0
    more = True
    while more and size <= _MAX_DISCARDED_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)


async def _read_body(receive: Receive, held: Held) -> bytearray:
    body = bytearray()
    refused = None
    size = 0
    more = True
    while more and size <= _MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if refused is None:
            refused = _taken(body, chunk, held)
    if refused is not None:
        raise refused
    return body


def _taken(body: bytearray, chunk: bytes, held: Held) -> RequestFailed | None:
    """Adds a chunk to the body. Returns the reason to keep no more of the body, or None."""
    if len(body) + len(chunk) > MAX_BODY_BYTES:
        body.clear()
        return RequestFailed(ErrorKind.BODY_TOO_LARGE, f"the request body is larger than {MAX_BODY_BYTES} bytes")
    try:
        held.add(chunk)
    except RequestFailed as error:
        body.clear()
        return error
    body += chunk
    return None


class _Client:
    """Cancels the current task when the client closes the connection before the whole response has been sent."""

    def __init__(self, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.gone = False
        self._complete = False
        self._receive = receive
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        return self._send(message)

    async def watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._complete:
            self.gone = True
            self.task.cancel()
