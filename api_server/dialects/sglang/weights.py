"""SGLang's routes that change, read and release the weights of the running model. Only operators may use them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.sglang.errors import error_body, render_error
from api_server.dialects.sglang.schema import ErrorResponse, Texts
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.generation import weights
from api_server.web.access import operators_only
from api_server.web.endpoint import Call, Document, Handler, endpoint
from api_server.web.json_bodies import json_response, read_json
from interfaces import KV_CACHE, WEIGHTS, GroupSpec, RunningMode, WeightsAction, WeightsAnswer

TAG = "weights"
# Rows of a weight, where the request names no number.
_ROWS = 100
_MOST_ROWS = 1 << 20
# A tag of SGLang's for memory that is not held here by itself.
_NO_MEMORY = "cuda_graph"


Running = Literal["wait", "in_place", "retract", "abort"]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Update(_Body):
    weight_version: str | None = Field(None, description="Name of the new version; by default a number")
    abort_all_requests: bool = Field(False, description="End all requests first")
    running: Running | None = Field(
        None,
        description="What becomes of running requests: they end first (`wait`, the default unless generation is "
        "paused), go on with the new weights on the K and V they have (`in_place`), have these computed again "
        "(`retract`), or are ended (`abort`)",
    )
    flush_cache: bool = Field(True, description="Without effect: no request finds K and V of another version")


class UpdateWeightsFromDisk(_Update):
    model_path: str = Field(description="A folder or file below those of --weights-dirs, or the server's own model")
    load_format: str | None = Field(None, description="auto or safetensors; pickles are never read")


class UpdateWeightsFromTensor(_Update):
    serialized_named_tensors: str | Texts = Field(
        description="Safetensors files in base64 (safetensors.torch.save), under the checkpoint's names; the others "
        "keep their values. Pickles are refused"
    )
    load_format: str | None = Field(None, description="safetensors, which is the default")
    hold: bool = Field(False, description="Keep them for the next update, with which they are served together")


class UpdateWeightsFromDistributed(_Update):
    names: Texts = Field(description="The tensors' names in the checkpoint, in the order in which they are sent")
    dtypes: Texts = Field(description="Their types, such as bfloat16")
    shapes: list[list[int]] = Field(description="Their shapes")
    group_name: str = Field("weight_update_group", description="The group in which rank 0 sends them")
    load_format: str | None = Field(None, description="Without effect unless it asks for another form than tensors")
    hold: bool = Field(False, description="Keep them for the next update, with which they are served together")


class InitWeightsUpdateGroup(_Body):
    master_address: str = Field(description="Host of the trainer, where its store listens")
    master_port: int
    rank_offset: int = Field(1, description="Rank of the first model worker; the others follow")
    world_size: int = Field(description="All members of the group, model workers included")
    group_name: str = "weight_update_group"
    backend: str = Field("", description="gloo or nccl; by default nccl on CUDA, and gloo elsewhere")


class DestroyWeightsUpdateGroup(_Body):
    group_name: str = "weight_update_group"


class GetWeightsByName(_Body):
    name: str = Field(description="The weight's name in the model")
    truncate_size: int = Field(_ROWS, description="How many of its first rows")


class UpdateWeightVersion(_Body):
    new_version: str
    abort_all_requests: bool = Field(True, description="End all requests first")


class MemoryOccupation(_Body):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = Field(
        None, description="What to release or take again; by default everything"
    )


class WeightsOutput(BaseModel):
    success: bool
    message: str
    num_paused_requests: int = Field(description="Requests that are open, and wait or go on with the new weights")
    weight_version: str


class Rows(RootModel[list[Any] | float]):
    """The first rows of a weight; the number of one without dimensions."""


class VersionAnswer(BaseModel):
    weight_version: str


def routes() -> list[Route]:
    errors: dict[int, type[BaseModel]] = {400: WeightsOutput, 403: ErrorResponse, 503: ErrorResponse}
    table: list[tuple[str, Handler, type[BaseModel], str]] = [
        ("/update_weights_from_disk", from_disk, UpdateWeightsFromDisk, "Serve other weights from files"),
        ("/update_weights_from_tensor", from_tensor, UpdateWeightsFromTensor, "Serve tensors of the request"),
        ("/update_weights_from_distributed", from_group, UpdateWeightsFromDistributed, "Receive and serve tensors"),
        ("/init_weights_update_group", join, InitWeightsUpdateGroup, "Join a group of torch.distributed"),
        ("/destroy_weights_update_group", leave, DestroyWeightsUpdateGroup, "Leave a group"),
        ("/update_weight_version", rename, UpdateWeightVersion, "Rename the version that is served"),
        ("/release_memory_occupation", release, MemoryOccupation, "Give memory back; requests wait"),
        ("/resume_memory_occupation", resume, MemoryOccupation, "Take memory again and go on"),
    ]
    made = [
        endpoint(
            path,
            operators_only(_answering(handler)),
            render_error,
            document=Document(summary, TAG, body=body, answer=WeightsOutput, errors=errors),
        )
        for path, handler, body, summary in table
    ]
    read = Document("The first rows of a weight, as lists", TAG, body=GetWeightsByName, answer=Rows, errors=errors)
    version = Document("The version of the weights that is served", TAG, answer=VersionAnswer)
    return [
        *made,
        endpoint("/get_weights_by_name", operators_only(_answering(by_name)), render_error, ("GET", "POST"), read),
        endpoint("/get_weight_version", served_version, render_error, ("GET",), version),
        endpoint("/weight_version", served_version, render_error, ("GET",), version),
    ]


async def from_disk(call: Call) -> Response:
    body = read_json(call, UpdateWeightsFromDisk, optional=True)
    _check_format(body.load_format, "auto", "safetensors")
    answer = weights.from_disk(call.server, body.model_path, body.weight_version or "", _running(body))
    return await _answered(call, answer, "Succeeded to update model weights.")


async def from_tensor(call: Call) -> Response:
    body = await call.apart(lambda: read_json(call, UpdateWeightsFromTensor, optional=True))
    _check_format(body.load_format, "safetensors")
    given = body.serialized_named_tensors
    texts = [given] if isinstance(given, str) else given
    answer = weights.from_files(call.server, texts, body.weight_version or "", _running(body), body.hold)
    return await _answered(call, answer, "Succeeded to update model weights.")


async def from_group(call: Call) -> Response:
    body = await call.apart(lambda: read_json(call, UpdateWeightsFromDistributed, optional=True))
    _check_format(body.load_format, "auto", "safetensors")
    specs = weights.specs(body.names, body.dtypes, body.shapes)
    version = body.weight_version or ""
    answer = weights.from_group(call.server, GroupSpec(body.group_name), specs, 0, version, _running(body), body.hold)
    return await _answered(call, answer, "Succeeded to update parameter online.")


async def join(call: Call) -> Response:
    body = read_json(call, InitWeightsUpdateGroup, optional=True)
    group = GroupSpec(
        body.group_name,
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.backend or weights.default_backend(call.server),
    )
    return await _answered(call, weights.join(call.server, group), "Succeeded to initialize custom process group.")


async def leave(call: Call) -> Response:
    body = read_json(call, DestroyWeightsUpdateGroup, optional=True)
    return await _answered(call, weights.leave(call.server, body.group_name), "Succeeded to destroy process group.")


async def rename(call: Call) -> Response:
    body = read_json(call, UpdateWeightVersion, optional=True)
    answer = weights.rename(call.server, body.new_version, body.abort_all_requests)
    return await _answered(call, answer, f"Weight version updated to {body.new_version}")


async def release(call: Call) -> Response:
    order = weights.ask(call.server, WeightsAction.RELEASE, tags=_tags(call))
    return await _answered(call, order, "Memory was released.")


async def resume(call: Call) -> Response:
    order = weights.ask(call.server, WeightsAction.RESUME, tags=_tags(call))
    return await _answered(call, order, "Memory was taken again.")


async def by_name(call: Call) -> Response:
    body = read_json(call, GetWeightsByName, optional=True)
    if not 0 <= body.truncate_size <= _MOST_ROWS:
        raise invalid(f"truncate_size must be 0 to {_MOST_ROWS}, got {body.truncate_size}", "truncate_size")
    answer = await weights.ask(call.server, WeightsAction.READ, name=body.name, most=body.truncate_size)
    return json_response(answer.values.reshape(answer.shape).tolist())


async def served_version(call: Call) -> Response:
    return json_response({"weight_version": weights.version_of(call.server)})


async def _answered(call: Call, asked: Awaitable[WeightsAnswer], message: str) -> Response:
    answer = await asked
    return json_response(
        {
            "success": True,
            "message": message,
            "num_paused_requests": answer.requests,
            "weight_version": answer.version,
        }
    )


def _answering(handler: Handler) -> Handler:
    """Wraps a handler so that a refusal has the form of its answers, and that of errors."""

    async def answering(call: Call) -> Response:
        try:
            return await handler(call)
        except RequestFailed as error:
            if error.kind is not ErrorKind.INVALID:
                raise
            output = {
                "success": False,
                "message": error.message,
                "num_paused_requests": 0,
                "weight_version": weights.version_of(call.server),
            }
            return json_response(output | error_body(error), 400)

    return answering


def _running(body: _Update) -> int:
    if body.running is not None:
        return weights.RUNNING[body.running]
    return RunningMode.ABORT if body.abort_all_requests else RunningMode.WAIT


def _tags(call: Call) -> list[str]:
    tags = read_json(call, MemoryOccupation, optional=True).tags
    return [WEIGHTS, KV_CACHE] if tags is None else [tag for tag in tags if tag != _NO_MEMORY]


def _check_format(given: str | None, *known: str) -> None:
    if given is not None and given not in known:
        raise invalid(
            f"load_format must be {' or '.join(known)}, got {given!r:.100}: send tensors as safetensors, since pickles "
            "can run code and are never read",
            "load_format",
        )
