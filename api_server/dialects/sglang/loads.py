"""GET /v1/loads: the load of each worker, for routers that choose between servers. A worker is SGLang's DP rank."""

from __future__ import annotations

import time

from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.sglang.errors import render_error
from api_server.dialects.sglang.schema import ErrorResponse
from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed
from api_server.release import release
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import Status


class Load(BaseModel):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int = Field(description="An even share: the line is common to all workers")
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float = Field(description="Used part of the KV memory")
    max_running_requests: int
    utilization: float = Field(description="Used part of the places in the batch")


class Aggregate(BaseModel):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_utilization: float


class Loads(BaseModel):
    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: Aggregate


def route() -> Route:
    document = Document("Load of each worker", "sglang", answer=Loads, errors={503: ErrorResponse})
    return endpoint("/v1/loads", show, render_error, ("GET",), document)


async def show(call: Call) -> Response:
    status = call.server.engine.status
    if status is None or not status.workers:
        raise RequestFailed(ErrorKind.UNAVAILABLE, "no model worker is ready yet", retry_after=RETRY_AFTER_SECONDS)
    return Response(loads_of(status).model_dump_json(), media_type="application/json")


def loads_of(status: Status) -> Loads:
    loads = _loads(status)
    return Loads(
        timestamp=time.time(),
        version=release(),
        dp_rank_count=len(loads),
        loads=loads,
        aggregate=Aggregate(
            total_running_reqs=status.running,
            total_waiting_reqs=status.waiting,
            total_reqs=status.running + status.waiting,
            avg_token_usage=sum(load.token_usage for load in loads) / len(loads),
            avg_utilization=sum(load.utilization for load in loads) / len(loads),
        ),
    )


def _loads(status: Status) -> list[Load]:
    count = len(status.workers)
    share, rest = divmod(status.waiting, count)
    return [
        Load(
            dp_rank=worker.index,
            num_running_reqs=worker.running,
            num_waiting_reqs=share + (i < rest),
            num_used_tokens=worker.blocks_used * status.block_size,
            max_total_num_tokens=worker.blocks_total * status.block_size,
            token_usage=worker.blocks_used / worker.blocks_total if worker.blocks_total else 0.0,
            max_running_requests=worker.max_rows,
            utilization=worker.running / max(1, worker.max_rows),
        )
        for i, worker in enumerate(status.workers)
    ]
