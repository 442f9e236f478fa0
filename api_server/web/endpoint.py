"""One HTTP endpoint of a dialect: reads the body, runs the handler, watches for the client going away.

Knows HTTP and the one rule of errors (a `RequestFailed` is rendered by the dialect, anything else is logged with its
traceback and rendered as INTERNAL). It knows no dialect and no model.
"""

from __future__ import annotations

import asyncio
import hashlib
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
from starlette.types import Receive, Scope, Send

from api_server.accounts.ledger import StreamName
from api_server.body.bodies import Held
from api_server.body.depth import DEEPEST, too_deep
from api_server.engine import resume, scheduling
from api_server.engine.resume import Resume
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.state import ServerState
from api_server.web.form import Form, read_form
from api_server.web.read_body import MAX_DISCARDED_BYTES, ClientGone, read_body
from api_server.web.watched_client import WatchedClient
from shared.access_keys import Caller

log = logging.getLogger("tokenyard")

T = TypeVar("T")


def _model_in(body: Mapping[str, Any]) -> object:
    return body.get("model")


@dataclass(frozen=True)
class BodyForm:
    """The form of a dialect's bodies, where it differs from that of most."""

    # Returns the name of the model in a body, as the server knows it; None where the body names none.
    model_in: Callable[[Mapping[str, Any]], object] = _model_in
    # True where clients send JSON under the type of a form, which curl does by itself.
    any_media_type: bool = False


COMMON_FORM = BodyForm()


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
    form: BodyForm = COMMON_FORM
    # True when the body is a multipart form, whose fields are `fields` then.
    is_form: bool = False
    fields: Form = field(default_factory=Form)
    # The stream that the request begins or takes up, where it can be taken up again.
    stream: StreamName | None = None

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def route_path(self) -> str:
        """The path with names in the place of its parameters: one for all models, as figures want it."""
        return str(getattr(self.scope.get("route"), "path", self.path))

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
        if too_deep(value, self.body):
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
        if _is_json(self.headers) or (may_be_left_out and (not declared or self.form.any_media_type)):
            return
        what = f"Unsupported Media Type: the content type must be application/json, got {declared[:100]!r}"
        raise RequestFailed(ErrorKind.BAD_MEDIA_TYPE, what)

    async def read_form(self, most_files: int) -> None:
        """Reads the body as a multipart form; the bytes are released then. Raises RequestFailed."""
        try:
            form = await read_form(self.headers, self.body, most_files)
        finally:
            self.body = b""
        options = scheduling.of_texts(form.text)
        self.fields = form.without(options)
        self._schedule(options)

    def _schedule(self, fields: Mapping[str, Any]) -> None:
        may_hurry = self.caller.admin or not self.server.keys.users
        scheduling.current.set(scheduling.options_of(self.headers, fields, self.caller, may_hurry))

    def _read_scheduling(self, fields: Mapping[str, Any]) -> None:
        self._schedule(fields)
        self.scope["state"]["resume"] = wanted = Resume.wanted(self.headers, self.request_id)
        resume.current.set(wanted)


def _is_json(headers: Headers) -> bool:
    """Whether a body is declared to be JSON."""
    declared = headers.get("content-type", "").partition(";")[0].strip().lower()
    return declared == "application/json" or declared.endswith("+json")


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
    # One event of the answer when it is streamed, and the media type of the stream.
    frame: type[BaseModel] | None = None
    frame_type: str = "text/event-stream"
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
    # True when vectors or scores of texts are computed, or their sound.
    pools: bool = False
    # True when the handler itself refuses a model of another task, in words of its own.
    checks_task: bool = False
    # Media types of an answer that is neither JSON nor text.
    media_types: Sequence[str] = ()
    # True when speech becomes text; the body is a form.
    hears: bool = False
    # Most files of a body that is a form although it is not about speech; 0: the body is JSON.
    files: int = 0
    # The body of a request that is sent as JSON to a route which takes a form, too.
    json_body: type[BaseModel] | None = None
    # True when text becomes speech, by models that pool or generate.
    speaks: bool = False

    @property
    def is_form(self) -> bool:
        """True when the body is a form, or may be one."""
        return self.hears or self.files > 0

    @property
    def generating(self) -> bool:
        """True when text is generated."""
        return self.generates or self.frame is not None

    @property
    def computes(self) -> bool:
        """True when a model has to compute something."""
        return self.generating or self.pools or self.hears

    @property
    def family(self) -> bool | None:
        """The models that all documents of this path are for: True if they pool, False if they generate, else None."""
        known = [found for found in (self, *self.also) if not found.hears]
        families = {found.pools for found in known if found.pools or found.generating}
        return families.pop() if len(families) == 1 else None


def endpoint(
    path: str,
    handler: Handler,
    render_error: ErrorRenderer,
    methods: Sequence[str] = ("POST",),
    document: Document | None = None,
    form: BodyForm = COMMON_FORM,
) -> Route:
    """Makes a route for `app.py`; `document` is found again as `route.endpoint.document`."""
    return Route(path, Endpoint(handler, render_error, document, form), methods=list(methods))


class Endpoint:
    """The ASGI application of one route. `app.py` puts `server`, `request_id` and `caller` into `scope["state"]`."""

    def __init__(
        self,
        handler: Handler,
        render_error: ErrorRenderer,
        document: Document | None,
        form: BodyForm = COMMON_FORM,
    ) -> None:
        self.document = document
        self._handler = handler
        self._form = form
        self._family = document.family if document is not None else None
        self._checks_family = self._family is not None and not (document is not None and document.checks_task)
        self._hears = document is not None and document.hears
        self._is_form = document is not None and document.is_form
        self._or_json = document is not None and document.json_body is not None
        self._most_files = max(1, document.files) if document is not None else 1
        self._speaks = document is not None and document.speaks
        self.render_error = render_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        generates = self.document is not None and self.document.computes
        call = Call(state["server"], scope, b"", state["request_id"], generates=generates, form=self._form)
        call.is_form = self._is_form and not (self._or_json and _is_json(call.headers))
        with call.server.bodies.hold(counts_values=not call.is_form) as held:
            await self._answer(call, held, receive, send)

    async def _answer(self, call: Call, held: Held, receive: Receive, send: Send) -> None:
        failure: RequestFailed | None = None
        try:
            call.body = await read_body(receive, held)
            await held.weigh(call.body)
            call.size = len(call.body)
            call.light = held.light
            if call.generates:
                call.stream = await _stream_of(call)
        except RequestFailed as error:
            failure = error
            call.body = b""
        except ClientGone:
            return
        client = WatchedClient(receive, send)
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
            if self._hears:
                call.server.that_hears(None)
            elif call.server.others and not call.is_form:
                await self._choose_model(call)
            if call.generates:
                call.scope["state"]["headers"], refusal = call.server.accounts.admit(call.caller, call.stream)
                if refusal is not None:
                    raise refusal
            if call.is_form:
                # After the limits of keys: parsing takes long.
                await call.read_form(self._most_files)
                call.server = self._that_reads(call.server, call.fields.text("model"))
            if self._checks_family:
                call.server.check_family(bool(self._family))
            if not call.light and not call.is_form:
                await call.apart(lambda: call.parsed)
                # SchedulingOptions belong to this task, not to the thread in which a handler may have the body read.
                _ = call.generates and call.json
            return await self._handler(call)
        except RequestFailed as error:
            return self._fail(error, call)
        except Exception:
            log.exception("request %s on %s failed by an error of ours", call.request_id, call.path)
            return self._fail(internal_error(call.request_id), call)

    def _that_reads(self, server: ServerState, named: str | None) -> ServerState:
        """The state of the model that a form is for. Raises RequestFailed."""
        return server.that_hears(named) if self._hears else server.of_model(named, self._family)

    async def _choose_model(self, call: Call) -> None:
        """Makes `call.server` the state of the model that the request is for."""
        named = call.path_params.get("model")
        if named is None and call.size:
            parsed = await call.apart(lambda: call.parsed)
            named = self._form.model_in(parsed) if isinstance(parsed, dict) else None
        server = call.server
        call.server = server.that_speaks(named) if self._speaks else server.of_model(named, self._family)

    def _fail(self, error: RequestFailed, call: Call) -> Response:
        call.server.record_failure(call.route_path, error)
        return self.render_error(error, call)


async def _stream_of(call: Call) -> StreamName | None:
    """The stream by its name and its body: another body under an old name is another request."""
    given = call.headers.get(resume.HEADER, "").lower()
    if given not in ("true", "end"):
        return None
    digest = await call.apart(lambda: hashlib.sha256(call.body).hexdigest())
    return StreamName(f"{call.request_id} {digest}", again=given == "end" or "last-event-id" in call.headers)


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
    while more and size <= MAX_DISCARDED_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
