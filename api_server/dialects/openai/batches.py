"""/v1/batches: requests in a file that are run when nothing else is."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints
from starlette.responses import Response
from starlette.routing import Route

from api_server.batches.records import Batch, new_batch_id
from api_server.body import unknown_fields, validation
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.files import page, query, store_of
from api_server.dialects.openai.schema import Body, ErrorAnswer
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import json_response

TAG = "openai"
# The routes that a batch may have.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
SECONDS = 24 * 3600
_DIALECT = "openai"
_Key = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]
_ERRORS = dict.fromkeys((400, 404), ErrorAnswer)


class BatchBody(Body):
    input_file_id: str = Field(description="A file with purpose batch: a line of JSON for each request")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[_Key, _Value] | None = Field(
        None, max_length=16, description="Up to 16 values of up to 512 characters, under names of up to 64"
    )


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchErrors(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


def routes() -> list[Route]:
    made = Document("Run the requests of a file", TAG, body=BatchBody, answer=BatchObject, errors=_ERRORS)
    listed = Document("Batches of this key", TAG, answer=BatchList, errors=_ERRORS)
    shown = Document("A batch", TAG, answer=BatchObject, errors=_ERRORS)
    cancelled = Document("End a batch; what has been answered stays", TAG, answer=BatchObject, errors=_ERRORS)
    return [
        endpoint("/v1/batches", create, render_error, document=made),
        endpoint("/v1/batches", list_batches, render_error, ("GET",), listed),
        endpoint("/v1/batches/{batch_id}", show, render_error, ("GET",), shown),
        endpoint("/v1/batches/{batch_id}/cancel", cancel, render_error, document=cancelled),
    ]


async def create(call: Call) -> Response:
    """POST /v1/batches."""
    store = store_of(call)
    unknown_fields.check(call.json, BatchBody, {})
    try:
        body = validation.parse(BatchBody, call.json)
    except validation.Mismatch as error:
        raise invalid(str(error), error.field or None) from None
    tenant = call.caller.name
    file = await asyncio.to_thread(store.file, tenant, body.input_file_id)
    if file.purpose != "batch":
        raise invalid(f"input_file_id must be a file with purpose batch, got one for {file.purpose}", "input_file_id")
    source = await asyncio.to_thread(store.content, tenant, body.input_file_id)
    now = int(time.time())
    batch = Batch(
        new_batch_id("batch_"),
        tenant,
        _DIALECT,
        body.endpoint,
        body.input_file_id,
        now,
        now + SECONDS,
        metadata=body.metadata,
    )
    return json_response(_shown(await asyncio.to_thread(store.create, batch, source)))


async def list_batches(call: Call) -> Response:
    """GET /v1/batches."""
    found = await asyncio.to_thread(store_of(call).batches, call.caller.name, _DIALECT)
    return page([_shown(batch) for batch in found], query(call), 20, 100)


async def show(call: Call) -> Response:
    """GET /v1/batches/{batch_id}."""
    return json_response(_shown(await _found(call)))


async def cancel(call: Call) -> Response:
    """POST /v1/batches/{batch_id}/cancel."""
    batch = await _found(call)
    if not batch.active and batch.status != "cancelling":
        raise invalid(f"the batch {batch.id} has ended ({batch.status}): there is nothing to cancel", "batch_id")
    await asyncio.to_thread(store_of(call).cancel, batch)
    return json_response(_shown(await _found(call)))


async def _found(call: Call) -> Batch:
    batch = await asyncio.to_thread(store_of(call).batch, call.caller.name, call.path_params["batch_id"])
    if batch.dialect != _DIALECT:
        raise RequestFailed(ErrorKind.NOT_FOUND, f"there is no batch {batch.id!r} of a file", field="batch_id")
    return batch


def _shown(batch: Batch) -> dict[str, Any]:
    stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{stage}_at": batch.times.get(stage) for stage in stages},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }
