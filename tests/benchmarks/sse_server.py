"""A real HTTP server with a scripted /v1/completions for tests of the load generator; `python -m` runs it as a process.

The prompt's first token id chooses what a request meets; a text is answered steadily, without usage and without
[DONE].
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

STEADY, BUSY, ERROR_IN_STREAM, CUT_OFF, HANGS, NO_USAGE, ONE_TOKEN = range(1, 8)
GAP_S = 0.03
FIRST_S = 0.1


class Recorder:
    """What the server saw."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.in_flight = 0
        self.most_in_flight = 0


def application(recorder: Recorder) -> Starlette:
    async def completions(request: Request) -> Response:
        body = orjson.loads(await request.body())
        recorder.bodies.append(body)
        script = body["prompt"][0]
        if script == BUSY:
            return JSONResponse({"error": {"message": "busy"}}, status_code=429)
        if not body["stream"]:
            tokens = int(body["max_tokens"])
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
            return JSONResponse({"choices": [{"text": " t" * tokens}], "usage": usage})
        return StreamingResponse(_counted(recorder, body, script), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "scripted"}]})

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


async def _counted(recorder: Recorder, body: dict[str, object], script: int) -> AsyncIterator[bytes]:
    recorder.in_flight += 1
    recorder.most_in_flight = max(recorder.most_in_flight, recorder.in_flight)
    try:
        async for event in _stream(body, script):
            yield event
    finally:
        recorder.in_flight -= 1


async def _stream(body: dict[str, object], script: int) -> AsyncIterator[bytes]:
    yield _text("")
    if script == HANGS:
        await asyncio.sleep(60)
    tokens = 1 if script == ONE_TOKEN else int(str(body["max_tokens"]))
    await asyncio.sleep(FIRST_S)
    for token in range(tokens):
        await asyncio.sleep(GAP_S if token else 0)
        yield _text(f" t{token}")
    yield b": a comment is no event\n\n"
    if script == ERROR_IN_STREAM:
        yield _event({"error": {"message": "the model failed"}})
    if script == CUT_OFF:
        return
    prompt = body["prompt"]
    if isinstance(prompt, str):  # as transformers serve ends
        yield _event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        return
    assert isinstance(prompt, list)
    if script != NO_USAGE:
        yield _event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens}})
    yield b"data: [DONE]\n\n"


def _text(text: str) -> bytes:
    return _event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


if __name__ == "__main__":
    uvicorn.run(application(Recorder()), port=int(sys.argv[1]), log_level="warning")
