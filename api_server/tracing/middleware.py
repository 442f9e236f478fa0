"""The application around the others that records requests for traces. Without an exporter it is not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server import access_log, trace_context
from api_server.access_log import Entry
from api_server.trace_context import TraceContext
from api_server.tracing.exporter import Exporter
from api_server.tracing.records import record


class Traced:
    """Gives each request that may compute something a span, and records it when it has ended."""

    def __init__(self, application: ASGIApp, exporter: Exporter) -> None:
        self._application = application
        self._exporter = exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._application(scope, receive, send)
            return
        caller = trace_context.caller(scope["headers"])
        span = self._exporter.begin(caller)
        trace_context.current.set(span)
        send = _naming(span, send)
        if not span.sampled:
            await self._application(scope, receive, send)
            return
        entry = access_log.current.get()
        if entry is None:
            entry = Entry()
            access_log.current.set(entry)
            send = entry.send(send)
        try:
            await self._application(scope, receive, send)
        finally:
            ended = record(scope, entry, span, caller)
            if ended is not None:
                self._exporter.add(ended)


def _naming(span: TraceContext, send: Send) -> Callable[[Message], Awaitable[None]]:
    """Wraps `send` to name the request's span in the answer, as W3C's draft of trace context level 2 does."""
    header = (b"traceresponse", span.parent.encode())

    def named(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], header]
        return send(message)

    return named
