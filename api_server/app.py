"""The HTTP application: every dialect's routes, the health routes, and the rules for all of them.

A dialect is a package `api_server.dialects.<name>` with `routes() -> list[Route]`, each made by
`api_server.web.endpoint.endpoint`. It reads the body with `call.json`, maps it to `TextGenerationRequest`, calls
`generation.generate(call.server, ...)` and answers a Starlette response, or `sse.EventStream(frames,
generation.close, error_frame)`.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Sequence
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from api_server import trace_context
from api_server.dialects import anthropic, generate_route, hosted, models_route, openai, pooling_routes
from api_server.dialects.anthropic import batches as anthropic_batches
from api_server.dialects.kserve import routes as kserve
from api_server.dialects.ollama import routes as ollama
from api_server.dialects.openai import batches as openai_batches
from api_server.dialects.openai import embeddings as openai_embeddings
from api_server.dialects.openai import files as openai_files
from api_server.dialects.openai import image_edits as openai_image_edits
from api_server.dialects.openai import images as openai_images
from api_server.dialects.openai import speech as openai_speech
from api_server.dialects.openai import transcriptions
from api_server.dialects.openai.errors import render_error
from api_server.dialects.sglang import adapters as sglang_adapters
from api_server.dialects.sglang import admin as sglang_admin
from api_server.dialects.sglang import encode as sglang_encode
from api_server.dialects.sglang import info as sglang_info
from api_server.dialects.sglang import loads as sglang_loads
from api_server.dialects.sglang import parsing as sglang_parsing
from api_server.dialects.sglang import sessions as sglang_sessions
from api_server.dialects.sglang import tokenize as sglang_tokenize
from api_server.dialects.sglang import weights as sglang_weights
from api_server.dialects.tei import routes as tei
from api_server.dialects.tgi import routes as tgi
from api_server.dialects.vllm import adapters as vllm_adapters
from api_server.dialects.vllm import weights as vllm_weights
from api_server.engine import health_probe
from api_server.errors import ErrorKind, RequestFailed
from api_server.http import descriptors
from api_server.http.pages import allow_pages
from api_server.http.paths import above, meant
from api_server.metrics.collector import Metrics, generation_paths, metrics_route
from api_server.metrics.live import LiveFigures, live_route
from api_server.metrics.request_table import RequestTable, request_routes
from api_server.metrics.usage import usage_route
from api_server.release import release
from api_server.state import ServerState
from api_server.web import openapi, page
from api_server.web.access import PUBLIC_PATHS, identify, public_paths
from api_server.web.direct_router import DirectRouter
from api_server.web.endpoint import Call, Document, Endpoint, ErrorRenderer, discard_body, endpoint, internal_error
from api_server.web.json_bodies import json_response
from shared import logs

log = logging.getLogger("tokenyard")

_LAST_ANSWER = ((b"connection", b"close"),)
# Probes: they come again soon, so an ended connection costs them nothing.
_PROBES = PUBLIC_PATHS | {"/"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create(server: ServerState, further_routes: Sequence[BaseRoute] = ()) -> Application:
    """Makes the application of one API process, and adds the metrics to `server.observers`."""
    routes = [
        *openai.routes(),
        *anthropic.routes(),
        *models_route.routes(),
        *generate_route.routes(),
        *tgi.routes(),
        *hosted.routes(),
        *sglang_info.routes(),
        *sglang_admin.routes(),
        *sglang_adapters.routes(),
        *vllm_adapters.routes(),
        *sglang_weights.routes(),
        *vllm_weights.routes(),
        *sglang_tokenize.routes(),
        *sglang_parsing.routes(),
        sglang_loads.route(),
        *sglang_sessions.routes(),
        openai_embeddings.route(),
        openai_speech.route(),
        *openai_images.routes(),
        *openai_image_edits.routes(),
        *transcriptions.routes(),
        *tei.routes(),
        sglang_encode.route(),
        *ollama.routes(),
        *kserve.routes(),
        *openai_files.routes(),
        *openai_batches.routes(),
        *anthropic_batches.routes(),
        *pooling_routes.routes(),
        *health_routes(),
        usage_route(),
        *further_routes,
    ]
    metrics = Metrics(server.model_name, generation_paths(routes))
    figures = LiveFigures(server)
    table = RequestTable()
    server.observers += [metrics, figures, table, *([server.accounts] if server.keys.users else [])]
    descriptors.watchers.append(metrics.connection_refused)
    described = [*routes, metrics_route(metrics), live_route(figures), *request_routes(table)]
    recognises = server.recogniser is not None
    undescribed = openapi.routes(
        described, release(), server.pooled_model is not None, recognises, server.speaking is not None, server.has_ears
    )
    undescribed += page.routes() if server.settings.ui else []
    return Application(server, [*described, *undescribed], metrics)


class Application:
    """The outermost ASGI callable: gives each request its id, and answers also after errors."""

    def __init__(self, server: ServerState, routes: Sequence[BaseRoute], metrics: Metrics) -> None:
        self.server = server
        self.metrics = metrics
        # True when each answer ends its connection, because this process will be gone.
        self.leaving = False
        # Time of the last request other than a probe, while leaving; on time.monotonic's clock.
        self.asked_at = float("-inf")
        self.routes = list(routes)
        # The routes without ids, keys and pages around them, for requests from within.
        self.router = DirectRouter(self.routes)
        origins = server.settings.cors_origins
        has_keys = bool(server.keys.users)
        self._public = public_paths(server.settings)
        self._served = allow_pages(self._serve, origins, self._public, has_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve = self._served if scope["type"] == "http" else self.router
        await serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        logs.of_request.set({"request_id": request_id, **_trace(scope)})
        scope["state"] = {"server": self.server, "request_id": request_id}
        scope["app"] = self  # makes the router raise HTTPException instead of answering by itself
        header = (b"x-request-id", request_id.encode())
        started = False
        if self.leaving and scope["path"] not in _PROBES:
            self.asked_at = time.monotonic()

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                # Those of the key's limits, if it has any.
                further = [(name.encode(), text.encode()) for name, text in scope["state"].get("headers", {}).items()]
                last = _LAST_ANSWER if self.leaving else ()
                message["headers"] = [*message["headers"], header, *further, *last]
            return send(message)

        try:
            scope["state"]["caller"] = identify(self.server.keys, self._public, scope)
            _check_path(scope["path"])
            await self.router(scope, receive, send_with_id)
        except RequestFailed as error:
            await discard_body(scope, receive)
            await self._keep_out(scope, error)(scope, receive, send_with_id)
        except HTTPException as error:
            await discard_body(scope, receive)
            await self._refuse(scope, error)(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            log.exception("request %s on %s failed by an error of ours", request_id, scope["path"])
            await self._render(internal_error(request_id), scope)(scope, receive, send_with_id)

    def _keep_out(self, scope: Scope, error: RequestFailed) -> Response:
        self.server.record_failure(scope["path"], error)
        response = self._render(error, scope)
        response.headers["www-authenticate"] = "Bearer"
        return response

    def _refuse(self, scope: Scope, error: HTTPException) -> Response:
        known = {404: ErrorKind.NOT_FOUND, 405: ErrorKind.METHOD_NOT_ALLOWED}.get(error.status_code)
        where = f"{scope['method']} {scope['path']}"
        what = "there is no such page" if known is ErrorKind.NOT_FOUND else HTTPStatus(error.status_code).phrase
        path = meant(scope["path"], self._exists) if known is ErrorKind.NOT_FOUND else None
        remedy = f"did you mean {path}?" if path else "see /docs"
        response = self._render(RequestFailed(known or ErrorKind.INVALID, f"{where}: {what}; {remedy}"), scope)
        response.headers.update(error.headers or {})
        return response

    def _render(self, error: RequestFailed, scope: Scope) -> Response:
        return self._renderer(scope["path"])(error, Call(self.server, scope, b"", scope["state"]["request_id"]))

    def _renderer(self, path: str) -> ErrorRenderer:
        """The error renderer of a path: its dialect's, or that of the meant path, or of a path above it."""
        candidates = (path, meant(path, self._exists) or path, *above(path))
        return next((found.render_error for found in map(self._endpoint, candidates) if found), render_error)

    def _exists(self, path: str) -> bool:
        return self._endpoint(path) is not None

    def _endpoint(self, path: str) -> Endpoint | None:
        known = (route for route in self.routes if isinstance(route, Route) and route.path_regex.match(path))
        return next((route.endpoint for route in known if isinstance(route.endpoint, Endpoint)), None)


def _check_path(path: str) -> None:
    """Refuses an empty name for a route that takes any: /v1/models/ is neither the list nor a model."""
    if path.endswith("/") and path not in ("/", page.ROOT):
        raise HTTPException(404)


def _request_id(scope: Scope) -> str:
    """The client's x-request-id if it is fit for headers and logs, else a fresh one."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _trace(scope: Scope) -> dict[str, str]:
    """The ids of the request's span, for log lines. Without traces of this server, its caller's span is passed on."""
    span = trace_context.current.get()
    if span is not None and span.made_here:
        return {"trace_id": span.trace_id, "span_id": span.span_id}
    span = trace_context.caller(scope["headers"])
    trace_context.current.set(span)
    return {} if span is None else {"trace_id": span.trace_id}


def health_routes() -> list[BaseRoute]:
    """Routes for load balancers and orchestrators: cheap, and honest."""
    pages = {
        "/": (_root, "That a server is here, as text; browsers are sent to /ui/"),
        "/health": (_health, "200 while the engine is alive and makes progress, 503 otherwise"),
        "/ping": (_health, "The same, where SageMaker looks for it"),
        "/health_generate": (_health_generate, "200 when a token comes out of the engine, 503 otherwise"),
        "/ready": (_ready, "200 when a request would be served now, 503 otherwise"),
    }
    return [
        endpoint(path, handler, render_error, ("GET",), Document(summary, "health"))
        for path, (handler, summary) in pages.items()
    ]


async def _root(call: Call) -> Response:
    if ollama.is_at_home(call):
        return ollama.greeting()
    if call.server.settings.ui and page.prefers_html(call.headers.get("accept", "")):
        return RedirectResponse(page.ROOT, 307, {"vary": "Accept"})
    return PlainTextResponse(
        f"tokenyard serves {', '.join(state.model_name for state in call.server.models)}. See /docs.\n"
    )


async def _health(call: Call) -> Response:
    health = call.server.health
    return Response(status_code=200) if health.alive else _unhealthy(health.reason)


async def _health_generate(call: Call) -> Response:
    for state in call.server.models:
        if problem := await health_probe.problem(state.engine):
            return _unhealthy(problem)
    return Response(status_code=200)


def _unhealthy(reason: str) -> Response:
    return json_response({"error": "unhealthy", "error_type": "healthcheck", "reason": reason}, 503)


async def _ready(call: Call) -> Response:
    health = call.server.health
    if health.ready:
        return json_response({"ready": True})
    return json_response({"ready": False, "reason": health.reason}, 503)
