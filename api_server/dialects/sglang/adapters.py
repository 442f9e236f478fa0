"""SGLang's routes that load and unload adapters. Only operators may use them (`access.py`)."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.sglang.errors import render_error
from api_server.dialects.sglang.schema import ErrorResponse
from api_server.errors import ErrorKind, RequestFailed
from api_server.generation import adapters
from api_server.web.access import operators_only
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import read_json
from interfaces import AdapterAnswer, AdapterState, AdapterStatus, LoRAStatus

TAG = "adapters"
# Time in which the requests of an unloaded adapter may end.
UNLOAD_SECONDS = 30.0


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class LoadLoRAAdapter(_Body):
    lora_name: str = Field(description="The adapter's name, which requests give as `lora_path` or `model`")
    lora_path: str = Field(description="Its folder, which must lie below those of --lora-dirs")
    pinned: bool = Field(False, description="Keep it in memory, also while no request uses it")


class LoadLoRAAdapterFromTensors(_Body):
    lora_name: str = Field(description="The adapter's name, which requests give as `lora_path` or `model`")
    config_dict: dict[str, Any] = Field(description="What PEFT writes into adapter_config.json")
    serialized_named_tensors: str = Field(
        description="adapter_model.safetensors in base64: safetensors.torch.save of PEFT's state. Pickles are refused"
    )
    pinned: bool = Field(False, description="Keep it in memory, also while no request uses it")


class UnloadLoRAAdapter(_Body):
    lora_name: str = Field(description="The adapter's name")


class LoRAUpdateOutput(BaseModel):
    success: bool
    error_message: str | None = None
    loaded_adapters: dict[str, str] = Field(description="The folders of the adapters that take requests, by name")


def routes() -> list[Route]:
    errors: dict[int, type[BaseModel]] = {400: LoRAUpdateOutput, 403: ErrorResponse, 503: ErrorResponse}
    load = Document(
        "Load an adapter",
        TAG,
        body=LoadLoRAAdapter,
        answer=LoRAUpdateOutput,
        errors=errors,
    )
    sent = Document(
        "Load an adapter from the request", TAG, body=LoadLoRAAdapterFromTensors, answer=LoRAUpdateOutput, errors=errors
    )
    unload = Document(
        "Unload an adapter, and wait for its requests",
        TAG,
        body=UnloadLoRAAdapter,
        answer=LoRAUpdateOutput,
        errors=errors,
    )
    return [
        endpoint("/load_lora_adapter", operators_only(load_adapter), render_error, document=load),
        endpoint("/load_lora_adapter_from_tensors", operators_only(load_tensors), render_error, document=sent),
        endpoint("/unload_lora_adapter", operators_only(unload_adapter), render_error, document=unload),
    ]


async def load_adapter(call: Call) -> Response:
    body = read_json(call, LoadLoRAAdapter)
    try:
        answer = await adapters.load(call.server, body.lora_name, body.lora_path, pinned=body.pinned)
    except RequestFailed as error:
        return _refused(error, call)
    return _answer(answer, call)


async def load_tensors(call: Call) -> Response:
    body = await call.apart(lambda: read_json(call, LoadLoRAAdapterFromTensors))
    given = body.serialized_named_tensors
    try:
        weights = await call.apart(lambda: adapters.safetensors_of(given, "serialized_named_tensors"))
        answer = await adapters.load_files(call.server, body.lora_name, body.config_dict, weights, pinned=body.pinned)
    except RequestFailed as error:
        return _refused(error, call)
    return _answer(answer, call)


async def unload_adapter(call: Call) -> Response:
    """Answers when the adapter's requests have ended, or that they have not after half a minute."""
    name = read_json(call, UnloadLoRAAdapter).lora_name
    known = call.server.adapters.get(name)
    answer = await adapters.unload(call.server, name)
    if answer.status is LoRAStatus.SUCCESS and answer.requests and known is not None:
        left = await adapters.wait_until_gone(call.server, known.handle, UNLOAD_SECONDS)
        if left:
            text = f"LoRA adapter {name!r} takes no new requests, but {left} still use it: it is freed with the last"
            return _rendered(text, call.server.adapters.values())
    return _answer(answer, call)


def _answer(answer: AdapterAnswer, call: Call) -> Response:
    # An answer without adapters was made here, before the scheduler was asked.
    everyone = answer.adapters or list(call.server.adapters.values())
    done = answer.status is LoRAStatus.SUCCESS
    return _rendered(None if done else answer.text or answer.status.value, everyone)


def _refused(error: RequestFailed, call: Call) -> Response:
    if error.kind is not ErrorKind.INVALID:
        raise error
    return _rendered(error.message, call.server.adapters.values())


def _rendered(problem: str | None, everyone: Any) -> Response:
    ready: list[AdapterStatus] = [one for one in everyone if one.state == AdapterState.READY]
    output = {
        "success": problem is None,
        "error_message": problem,
        "loaded_adapters": {one.name: one.path for one in ready},
    }
    return Response(orjson.dumps(output), 200 if problem is None else 400, media_type="application/json")
