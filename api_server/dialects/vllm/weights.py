"""vLLM's routes for trainers: pause and resume, sleep and wake up, and new weights over a group. For operators only."""

from __future__ import annotations

from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.errors import invalid, shown
from api_server.generation import pausing, weights
from api_server.web.access import operators_only
from api_server.web.endpoint import Call, Document, Handler, endpoint
from api_server.web.json_bodies import json_response, read_json
from interfaces import KV_CACHE, WEIGHTS, GroupSpec, RunningMode, WeightsAction

TAG = "weights"
# Group of the transfer engine, where the request names none.
_GROUP = "weight_transfer"
# More than the tensors of one message ever have.
_MOST_PACKED_BYTES = 1 << 40
_LEVELS = ("0", "1", "2")
# A tag of vLLM's: wake up nothing but the scheduler.
_SCHEDULING = "scheduling"


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class InitInfo(_Body):
    master_address: str
    master_port: int
    rank_offset: int = Field(1, description="Rank of the first model worker; the others follow")
    world_size: int
    group_name: str = _GROUP
    backend: str = Field("", description="gloo or nccl; by default nccl on CUDA, and gloo elsewhere")
    packed: bool = Field(False, description="Whether the tensors of a message come as bytes, many at a time")
    packed_buffer_size_bytes: int = Field(
        1 << 30, ge=1, le=_MOST_PACKED_BYTES, description="Bytes that packed tensors exceed, as the trainer counts them"
    )


class InitTransfer(_Body):
    init_info: InitInfo


class UpdateInfo(_Body):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = Field(False, description="As in init_info: either says it")
    packed_buffer_size_bytes: int | None = Field(
        None, ge=1, le=_MOST_PACKED_BYTES, description="By default as in init_info"
    )
    group_name: str = _GROUP
    src: int = Field(0, description="Rank that sends")


class UpdateWeights(_Body):
    update_info: UpdateInfo


class FinishUpdate(_Body):
    weight_version: str | None = Field(None, description="Name of the new version; by default a number")


class StartUpdate(_Body):
    is_checkpoint_format: bool = Field(True, description="Must be true: tensors have the checkpoint's names and shapes")


class StatusAnswer(BaseModel):
    status: str


class Paused(BaseModel):
    is_paused: bool


class Sleeping(BaseModel):
    is_sleeping: bool


class CacheReset(BaseModel):
    success: bool
    message: str = Field("", description="Why not")


class WorldSize(BaseModel):
    world_size: int


class Acknowledged(BaseModel):
    message: str


class UpdateFinished(BaseModel):
    message: str
    weight_version: str


def routes() -> list[Route]:
    errors = dict.fromkeys((400, 403, 503), ErrorAnswer)
    modes = "`?mode=abort` (the default), `wait` or `keep`"
    levels = "`?level=0`, `1` (the default) or `2`, and a `mode`"
    table: list[tuple[str, str, Handler, type[BaseModel] | None, type[BaseModel], str]] = [
        ("POST", "/pause", pause, None, StatusAnswer, f"Stop computing: {modes}"),
        ("POST", "/resume", resume, None, StatusAnswer, "Go on computing"),
        ("GET", "/is_paused", is_paused, None, Paused, "Whether generation is paused"),
        ("POST", "/sleep", sleep, None, StatusAnswer, f"Give memory back: {levels}"),
        ("POST", "/wake_up", wake_up, None, StatusAnswer, "Take memory again: `?tags=weights` or `kv_cache`, or both"),
        ("GET", "/is_sleeping", is_sleeping, None, Sleeping, "Whether memory was given back"),
        ("POST", "/reset_prefix_cache", reset_prefix_cache, None, CacheReset, "Drop all cached prefixes"),
        ("GET", "/get_world_size", world_size, None, WorldSize, "The number of model workers"),
        ("POST", "/init_weight_transfer_engine", init_transfer, InitTransfer, Acknowledged, "Join a trainer's group"),
        ("POST", "/start_weight_update", start_update, StartUpdate, Acknowledged, "Begin to send weights"),
        ("POST", "/update_weights", update_weights, UpdateWeights, Acknowledged, "Receive tensors, and hold them"),
        ("POST", "/finish_weight_update", finish_update, FinishUpdate, UpdateFinished, "Serve what was received"),
    ]
    return [
        endpoint(
            path,
            operators_only(handler),
            render_error,
            (method,),
            Document(summary, TAG, body=body, answer=answer, errors=errors),
        )
        for method, path, handler, body, answer, summary in table
    ]


async def pause(call: Call) -> Response:
    await pausing.pause(call.server, _mode(call))
    return json_response({"status": "paused"})


async def resume(call: Call) -> Response:
    await pausing.go_on(call.server)
    return json_response({"status": "resumed"})


async def is_paused(call: Call) -> Response:
    return json_response({"is_paused": pausing.is_paused(call.server)})


async def sleep(call: Call) -> Response:
    """Level 0 pauses, 1 gives the K and V back (on CUDA the weights, too), and 2 both."""
    level = _query(call, "level", "1")
    if level not in _LEVELS:
        raise invalid(f"level must be one of {', '.join(_LEVELS)}, got {shown(level)}", "level")
    mode = _mode(call)
    if level == "0":
        await pausing.pause(call.server, mode)
    else:
        both = level == "2" or weights.on_cuda(call.server)
        await weights.release(call.server, [WEIGHTS, KV_CACHE] if both else [KV_CACHE], mode)
    return json_response({"status": "sleeping"})


async def wake_up(call: Call) -> Response:
    tags = parse_qs(call.scope["query_string"].decode("latin-1")).get("tags", [])
    wrong = [tag for tag in tags if tag not in (WEIGHTS, KV_CACHE, _SCHEDULING)]
    if wrong:
        raise invalid(f"tags must be {WEIGHTS}, {KV_CACHE} or {_SCHEDULING}, got {shown(wrong[0])}", "tags")
    memory = [tag for tag in (WEIGHTS, KV_CACHE) if tag in tags or not tags]
    if memory:
        await weights.ask(call.server, WeightsAction.RESUME, tags=memory)
    if not tags or _SCHEDULING in tags:
        await pausing.go_on(call.server)
    return json_response({"status": "awake"})


async def is_sleeping(call: Call) -> Response:
    status = call.server.engine.status
    return json_response({"is_sleeping": status is not None and bool(status.weights.absent)})


async def reset_prefix_cache(call: Call) -> Response:
    refused = await pausing.flush(call.server)
    return json_response({"success": not refused, **({"message": refused} if refused else {})})


async def world_size(call: Call) -> Response:
    return json_response({"world_size": len(call.server.engine.status.workers) if call.server.engine.status else 0})


async def init_transfer(call: Call) -> Response:
    info = read_json(call, InitTransfer, optional=True).init_info
    backend = info.backend or weights.default_backend(call.server)
    group = GroupSpec(
        info.group_name,
        info.master_address,
        info.master_port,
        info.rank_offset,
        info.world_size,
        backend,
        info.packed,
        info.packed_buffer_size_bytes,
    )
    await weights.join(call.server, group)
    return json_response({"message": "Weight transfer initialized"})


async def start_update(call: Call) -> Response:
    if not read_json(call, StartUpdate, optional=True).is_checkpoint_format:
        raise invalid(
            "is_checkpoint_format must be true: send tensors under the names and in the shapes of the checkpoint",
            "is_checkpoint_format",
        )
    return json_response({"message": "Weight update started"})


async def update_weights(call: Call) -> Response:
    info = (await call.apart(lambda: read_json(call, UpdateWeights, optional=True))).update_info
    specs = weights.specs(info.names, info.dtype_names, info.shapes)
    group = GroupSpec(info.group_name, packed=info.packed, packed_bytes=info.packed_buffer_size_bytes or 0)
    await weights.from_group(call.server, group, specs, info.src, "", RunningMode.KEEP, hold=True)
    return json_response({"message": "Weights updated"})


async def finish_update(call: Call) -> Response:
    """Running requests go on: a trainer pauses them first as it likes."""
    version = read_json(call, FinishUpdate, optional=True).weight_version or ""
    answer = await weights.finish(call.server, version)
    return json_response({"message": "Weight update finished", "weight_version": answer.version})


def _mode(call: Call) -> str:
    mode = _query(call, "mode", "abort")
    if mode not in pausing.MODES:
        raise invalid(f"mode must be one of {', '.join(pausing.MODES)}, got {shown(mode)}", "mode")
    return mode


def _query(call: Call, name: str, default: str) -> str:
    given: list[str] = parse_qs(call.scope["query_string"].decode("latin-1")).get(name, [default])
    return given[-1]
