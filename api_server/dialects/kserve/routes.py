"""The endpoints of the Open Inference Protocol v2, each with and without a version in its path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from api_server.answers.choice import Choice, complete
from api_server.dialects.kserve import requests
from api_server.dialects.kserve.errors import error_frame, render_error
from api_server.dialects.kserve.schema import (
    ErrorAnswer,
    GenerateAnswer,
    GenerateBody,
    InferAnswer,
    InferBody,
    Live,
    ModelFacts,
    ModelReady,
    Parameters,
    Ready,
    ServerFacts,
)
from api_server.dialects.plain_errors import STATUSES
from api_server.errors import invalid
from api_server.generation.generation import Generation, generate
from api_server.release import release
from api_server.web.endpoint import Call, Document, Handler, endpoint
from api_server.web.json_bodies import json_response
from api_server.web.sse import EventStream, frame

TAG = "kserve"

_ERRORS = dict.fromkeys(STATUSES, ErrorAnswer)
_MISSING = {404: ErrorAnswer}
_UNREADY = {503: Ready}

# The outputs of infer, with their datatype and the element of a choice.
_OUTPUTS: dict[str, tuple[str, Callable[[Choice], Any]]] = {
    "text_output": ("BYTES", lambda choice: choice.text),
    "finish_reason": ("BYTES", lambda choice: _reason(choice)),
    "num_input_tokens": ("UINT32", lambda choice: choice.prompt_tokens),
    "num_output_tokens": ("UINT32", lambda choice: choice.completion_tokens),
}


def routes() -> list[Route]:
    generating = {
        "infer": (infer, Document("Answer prompts", TAG, InferBody, InferAnswer, errors=_ERRORS, generates=True)),
        "generate": (
            generate_once,
            Document("Answer a prompt", TAG, GenerateBody, GenerateAnswer, errors=_ERRORS, generates=True),
        ),
        "generate_stream": (
            generate_stream,
            Document("Answer a prompt, event by event", TAG, GenerateBody, frame=GenerateAnswer, errors=_ERRORS),
        ),
    }
    ready = Document("200 when the model would answer now", TAG, answer=ModelReady, errors=_MISSING | {503: ModelReady})
    facts = Document("Inputs and outputs of a model", TAG, answer=ModelFacts, errors=_MISSING)
    return [
        _page("/v2", server_facts, Document("The server", TAG, answer=ServerFacts)),
        _page("/v2/health/live", live, Document("200 while the engine is alive", TAG, answer=Live, errors={503: Live})),
        _page(
            "/v2/health/ready", readiness, Document("200 when requests are served", TAG, answer=Ready, errors=_UNREADY)
        ),
        *(
            endpoint(f"{path}/{name}", handler, render_error, document=document)
            for path in _PATHS
            for name, (handler, document) in generating.items()
        ),
        *(_page(f"{path}/ready", model_ready, ready) for path in _PATHS),
        *(_page(path, model_facts, facts) for path in _PATHS),
    ]


# Paths of a model; the longer one must come first, because a name may have slashes.
_PATHS = ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")


def _page(path: str, handler: Handler, document: Document) -> Route:
    return endpoint(path, handler, render_error, ("GET",), document)


async def server_facts(call: Call) -> Response:
    """GET /v2."""
    return json_response({"name": "tokenyard", "version": release(), "extensions": ["generate"]})


async def live(call: Call) -> Response:
    """GET /v2/health/live."""
    alive = call.server.health.alive
    return json_response({"live": alive}, 200 if alive else 503)


async def readiness(call: Call) -> Response:
    """GET /v2/health/ready."""
    ready = call.server.health.ready
    return json_response({"ready": ready}, 200 if ready else 503)


async def model_ready(call: Call) -> Response:
    """GET /v2/models/{model}/ready."""
    requests.check_model(call)
    ready = call.server.engine.health().ready
    return json_response({"name": call.path_params["model"], "ready": ready}, 200 if ready else 503)


async def model_facts(call: Call) -> Response:
    """GET /v2/models/{model}."""
    requests.check_model(call)
    generates = call.server.pooled_model is None
    inputs = [{"name": requests.PROMPT, "datatype": "BYTES", "shape": [-1]}] if generates else []
    outputs = [{"name": name, "datatype": kind, "shape": [-1]} for name, (kind, _) in _OUTPUTS.items()]
    return json_response(
        {
            "name": call.path_params["model"],
            "versions": [requests.VERSION],
            "platform": "tokenyard",
            "inputs": inputs,
            "outputs": outputs if generates else [],
        }
    )


async def infer(call: Call) -> Response:
    """POST /v2/models/{model}/infer."""
    body = await call.apart(lambda: requests.read(call, InferBody))
    wanted = [output.name for output in body.outputs or ()] or ["text_output"]
    for name in wanted:
        if name not in _OUTPUTS:
            raise invalid(f"outputs: there is no output {name!r:.100}; there are {', '.join(_OUTPUTS)}", "outputs")
    asked = await call.apart(lambda: requests.infer_requests(call, body))
    choices = await (await generate(call.server, asked)).collect()
    for choice in choices:
        complete(choice.finish)
    outputs = [
        {
            "name": name,
            "datatype": _OUTPUTS[name][0],
            "shape": [len(choices)],
            "data": [_OUTPUTS[name][1](choice) for choice in choices],
        }
        for name in wanted
    ]
    return json_response(_envelope(call, body.id) | {"outputs": outputs})


async def generate_once(call: Call) -> Response:
    """POST /v2/models/{model}/generate."""
    body, generation = await _generation(call)
    (choice,) = await generation.collect()
    answer = {"text_output": choice.text, "finish_reason": _reason(choice)}
    return json_response(_envelope(call, body.id) | answer)


async def generate_stream(call: Call) -> Response:
    """POST /v2/models/{model}/generate_stream."""
    body, generation = await _generation(call)
    return EventStream(_events(_envelope(call, body.id), generation), generation.close, error_frame)


async def _generation(call: Call) -> tuple[GenerateBody, Generation]:
    body = await call.apart(lambda: requests.read(call, GenerateBody))
    request = requests.request(call, body.text_input, body.parameters or Parameters())
    return body, await generate(call.server, request)


async def _events(envelope: dict[str, Any], generation: Generation) -> AsyncIterator[bytes]:
    async for delta in generation:
        if delta.finish is not None:
            yield frame(envelope | {"text_output": delta.text, "finish_reason": _reason(generation.choices[0])})
        elif delta.text:
            yield frame(envelope | {"text_output": delta.text})


def _envelope(call: Call, given_id: str | None) -> dict[str, Any]:
    facts = {"model_name": call.path_params["model"], "model_version": requests.VERSION}
    return facts if given_id is None else {"id": given_id, **facts}


def _reason(choice: Choice) -> str:
    """The reason for the end. Raises RequestFailed for an answer that the server cut off."""
    return "length" if complete(choice.finish).kind == "length" else "stop"
