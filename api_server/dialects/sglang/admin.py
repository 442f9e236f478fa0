"""SGLang's routes for operators and trainers: flush the cache, abort requests, pause and continue.

Orders go to the scheduler, so they hold for all API processes. Only operators may give them (`access.py`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal
from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from api_server.dialects.sglang.errors import render_error
from api_server.dialects.sglang.schema import ErrorResponse
from api_server.errors import invalid
from api_server.generation import pausing
from api_server.web.access import operators_only
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import read_json
from interfaces import Action

MAX_FLUSH_WAIT = 600.0
_RETRY_SECONDS = 0.05


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class AbortRequest(_Body):
    rid: str = Field("", description="Requests whose id begins so are ended: `a` also ends `a_0` of a batch")
    abort_all: bool = Field(False, description="End every request")


class PauseRequest(_Body):
    """The mode of a pause. New requests wait in every mode.

    `in_place` keeps the running requests' memory, `retract` gives it back and computes them again later, `abort` ends
    all requests.
    """

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueRequest(_Body):
    torch_empty_cache: bool = Field(True, description="Without effect: no memory is held that could be given back")


class Done(BaseModel):
    message: str
    status: Literal["ok"] = "ok"


def routes() -> list[Route]:
    errors = dict.fromkeys((400, 403, 503), ErrorResponse)
    flush = Document(
        "Drop all cached prefixes",
        "sglang",
        errors=errors,
        description="Refused with 400 while requests run or wait; `?timeout=SECONDS` waits for them to end.",
    )
    abort = Document("End requests", "sglang", body=AbortRequest, errors=errors, example={"rid": "my-request"})
    pause = Document(
        "Stop computing", "sglang", body=PauseRequest, answer=Done, errors=errors, example={"mode": "in_place"}
    )
    go_on = Document("Go on computing", "sglang", body=ContinueRequest, answer=Done, errors=errors, example={})
    return [
        endpoint("/flush_cache", operators_only(flush_cache), render_error, ("GET", "POST"), flush),
        endpoint("/abort_request", operators_only(abort_request), render_error, document=abort),
        endpoint("/pause_generation", operators_only(pause_generation), render_error, document=pause),
        endpoint("/continue_generation", operators_only(continue_generation), render_error, document=go_on),
    ]


async def flush_cache(call: Call) -> Response:
    deadline = time.monotonic() + _timeout(call)
    while True:
        refused = await pausing.flush(call.server)
        if not refused:
            return PlainTextResponse("Cache flushed.\n")
        if time.monotonic() >= deadline:
            raise invalid(f"Failed to flush cache: {refused}")
        await asyncio.sleep(_RETRY_SECONDS)


async def abort_request(call: Call) -> Response:
    """Aborts requests. An unknown id is no error: the request may have ended just now."""
    body = read_json(call, AbortRequest, optional=True)
    if not body.rid and not body.abort_all:
        raise invalid("rid must name a request, or abort_all must be true", "rid")
    await pausing.order(call.server, Action.ABORT, [pausing.EVERY_REQUEST if body.abort_all else body.rid])
    return Response(status_code=200)


async def pause_generation(call: Call) -> Response:
    mode = read_json(call, PauseRequest, optional=True).mode
    await pausing.pause(call.server, "keep" if mode == "in_place" else mode)
    return _done("Generation paused successfully.")


async def continue_generation(call: Call) -> Response:
    read_json(call, ContinueRequest, optional=True)
    await pausing.go_on(call.server)
    return _done("Generation continued successfully.")


def _timeout(call: Call) -> float:
    given = parse_qs(call.scope["query_string"].decode("latin-1")).get("timeout", ["0"])[-1]
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_FLUSH_WAIT:
        raise invalid(f"timeout must be 0 to {MAX_FLUSH_WAIT:.0f} seconds, got {given[:50]!r}", "timeout")
    return seconds


def _done(message: str) -> Response:
    return Response(Done(message=message).model_dump_json(), media_type="application/json")
