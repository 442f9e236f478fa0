"""GET /model_info and /server_info: facts that SGLang's clients ask for before they send work."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.sglang.errors import render_error
from api_server.dialects.sglang.schema import ErrorResponse
from api_server.errors import ErrorKind, RequestFailed
from api_server.generation import weights
from api_server.release import release
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import Status

_SECRET = re.compile("key|token$|secret|password", re.IGNORECASE)


class ModelInfo(BaseModel):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    preferred_sampling_params: str | None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool


class ServerInfo(BaseModel):
    """Facts of the server. Every setting of the server is a key, too."""

    model_config = ConfigDict(extra="allow")

    model_path: str
    served_model_name: str
    max_total_num_tokens: int
    max_req_input_len: int
    max_running_requests: int
    page_size: int
    version: str
    internal_states: list[dict[str, Any]]
    vllm_config: dict[str, dict[str, str]] = Field(description="What trainers ask vLLM for before they send weights")


def routes() -> list[Route]:
    """The routes of each page, under its name and under the older `get_` name."""
    model = Document("The served model", "sglang", answer=ModelInfo)
    server = Document("Settings and state of the server", "sglang", answer=ServerInfo, errors={503: ErrorResponse})
    pages = {"model_info": (model_info, model), "server_info": (server_info, server)}
    return [
        endpoint(f"/{prefix}{name}", handler, render_error, ("GET",), document)
        for name, (handler, document) in pages.items()
        for prefix in ("", "get_")
    ]


async def model_info(call: Call) -> Response:
    name = call.server.model_name
    path = call.server.settings.model or name
    facts = ModelInfo(
        model_path=path,
        tokenizer_path=path,
        is_generation=call.server.pooled_model is None,
        served_model_name=name,
        preferred_sampling_params=None,
        weight_version=weights.version_of(call.server),
        has_image_understanding=call.server.sees,
        has_audio_understanding=call.server.listens,
    )
    return Response(facts.model_dump_json(), media_type="application/json")


async def server_info(call: Call) -> Response:
    status = call.server.engine.status
    settings = call.server.settings
    if status is None or call.server.max_model_len is None:
        raise RequestFailed(ErrorKind.UNAVAILABLE, "the model is not loaded yet", retry_after=1)
    facts = dataclasses.asdict(settings) | {
        "model_path": settings.model or call.server.model_name,
        "served_model_name": call.server.model_name,
        "max_total_num_tokens": sum(w.blocks_total for w in status.workers) * status.block_size,
        "max_req_input_len": call.server.max_model_len - 1,
        "max_running_requests": status.max_running,
        "page_size": status.block_size,
        "version": release(),
        "internal_states": _internal_states(status),
        "vllm_config": {
            # Log-probabilities are those after temperature and processors.
            "model_config": {"dtype": f"torch.{settings.dtype}", "logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": weights.default_backend(call.server)},
        },
    }
    return Response(orjson.dumps(redacted(facts)), media_type="application/json")


def redacted(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts without values that give access: an API key once leaked from this page of another server."""
    return {name: "***" if _SECRET.search(name) and value else value for name, value in facts.items()}


def _internal_states(status: Status) -> list[dict[str, Any]]:
    return [
        {
            "device": worker.device,
            "backend": worker.backend,
            "running": worker.running,
            "effective_max_running_requests_per_dp": worker.max_rows,
            "step_tokens": worker.step_tokens,
            "memory_usage": {"token_capacity": worker.blocks_total * status.block_size},
            "token_usage": worker.blocks_used / worker.blocks_total if worker.blocks_total else 0.0,
            "steps": worker.steps,
        }
        for worker in status.workers
    ]
