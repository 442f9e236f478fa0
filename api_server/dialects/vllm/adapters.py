"""vLLM's routes that load and unload adapters. Only operators may use them (`access.py`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.generation import adapters
from api_server.web.access import operators_only
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import read_json
from interfaces import AdapterAnswer, LoRAStatus

TAG = "adapters"

_KINDS = {
    LoRAStatus.LOAD_NAME_EXISTS: ErrorKind.INVALID,
    LoRAStatus.LOAD_INVALID_ADAPTER: ErrorKind.INVALID,
    LoRAStatus.LOAD_INVALID_PATH: ErrorKind.MODEL_NOT_FOUND,
    LoRAStatus.UNLOAD_NAME_NONEXISTENT: ErrorKind.MODEL_NOT_FOUND,
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class LoadAdapterBody(_Body):
    lora_name: str = Field("", description="The adapter's name, which requests give as `model`")
    lora_path: str = Field("", description="Its folder, which must lie below those of --lora-dirs")
    load_inplace: bool = Field(False, description="Take the place of an adapter of this name")
    pinned: bool = Field(False, description="Keep it in memory, also while no request uses it")


class UnloadAdapterBody(_Body):
    lora_name: str = Field("", description="The adapter's name")


def routes() -> list[Route]:
    errors = dict.fromkeys((400, 403, 404, 500, 503), ErrorAnswer)
    load = Document(
        "Load an adapter",
        TAG,
        body=LoadAdapterBody,
        errors=errors,
    )
    unload = Document("Unload an adapter", TAG, body=UnloadAdapterBody, errors=errors)
    return [
        endpoint("/v1/load_lora_adapter", operators_only(load_adapter), render_error, document=load),
        endpoint("/v1/unload_lora_adapter", operators_only(unload_adapter), render_error, document=unload),
    ]


async def load_adapter(call: Call) -> Response:
    body = read_json(call, LoadAdapterBody)
    if not body.lora_name or not body.lora_path:
        raise invalid("Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if body.lora_name else None)
    answer = await adapters.load(
        call.server, body.lora_name, body.lora_path, pinned=body.pinned, replace=body.load_inplace
    )
    if answer.status is LoRAStatus.LOAD_NAME_EXISTS:
        raise invalid(
            f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True.",
            "lora_name",
        )
    _check(answer, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(call: Call) -> Response:
    """Answers at once. The requests that use the adapter go on."""
    name = read_json(call, UnloadAdapterBody).lora_name
    if not name:
        raise invalid("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    answer = await adapters.unload(call.server, name)
    if answer.status is LoRAStatus.UNLOAD_NAME_NONEXISTENT:
        text = f"The lora adapter '{name}' cannot be found."
        raise RequestFailed(ErrorKind.MODEL_NOT_FOUND, text, field="lora_name")
    _check(answer, name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check(answer: AdapterAnswer, name: str) -> None:
    """Raises RequestFailed unless the order was carried out."""
    if answer.status is not LoRAStatus.SUCCESS:
        kind = _KINDS.get(answer.status, ErrorKind.GENERATION_FAILED)
        raise RequestFailed(kind, f"The lora adapter '{name}' cannot be used: {answer.text}", field="lora_path")
