"""/v1/messages/batches: many messages in one request, which are run when nothing else is."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from api_server.batches import lines
from api_server.batches.records import Batch, StoredFile, new_batch_id
from api_server.batches.store import Store, no_room
from api_server.body import validation
from api_server.dialects.anthropic.errors import render_error
from api_server.dialects.anthropic.schema import ErrorAnswer
from api_server.dialects.openai.files import query, store_of
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import json_response

TAG = "anthropic"
_DIALECT = "anthropic"
_ENDPOINT = "/v1/messages"
_SECONDS = 24 * 3600
_MOST_LISTED = 1000
# Bytes of results, or more, that are read and sent at a time.
_PIECE = 256 << 10
# Errors of requests that did not run, by the code in the output.
_UNANSWERED = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_ERRORS = dict.fromkeys((400, 404), ErrorAnswer)


class BatchRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    custom_id: str = Field(min_length=1, max_length=64)
    params: dict[str, Any] = Field(description="A body of /v1/messages")


class BatchBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    requests: Annotated[list[BatchRequest], Field(fail_fast=True, min_length=1, max_length=lines.MOST_LINES)]


class RequestCounts(BaseModel):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(BaseModel):
    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchPage(BaseModel):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(BaseModel):
    id: str
    type: Literal["message_batch_deleted"]


def routes() -> list[Route]:
    made = Document("Run messages", TAG, body=BatchBody, answer=MessageBatch, errors=_ERRORS)
    listed = Document("Batches of this key", TAG, answer=MessageBatchPage, errors=_ERRORS)
    shown = Document("A batch", TAG, answer=MessageBatch, errors=_ERRORS)
    deleted = Document("Delete a batch that has ended", TAG, answer=Deleted, errors=_ERRORS)
    results = Document("Results, a line of JSON for each request", TAG, errors=_ERRORS)
    path = "/v1/messages/batches"
    one = path + "/{batch_id}"
    return [
        endpoint(path, create, render_error, document=made),
        endpoint(path, list_batches, render_error, ("GET",), listed),
        endpoint(one, show, render_error, ("GET",), shown),
        endpoint(one, delete, render_error, ("DELETE",), deleted),
        endpoint(f"{one}/cancel", cancel, render_error, document=shown),
        endpoint(f"{one}/results", read_results, render_error, ("GET",), results),
    ]


async def create(call: Call) -> Response:
    """POST /v1/messages/batches."""
    store = store_of(call)
    body = await call.apart(lambda: _read(call))
    tenant = call.caller.name
    source = await asyncio.to_thread(_write, store, tenant, body.requests, call.size)
    now = int(time.time())
    batch = Batch(
        new_batch_id("msgbatch_"), tenant, _DIALECT, _ENDPOINT, "", now, now + _SECONDS, total=len(body.requests)
    )
    try:
        made = await asyncio.to_thread(store.create, batch, store.content(tenant, source.id))
    finally:
        # The batch has the lines under a name of its own.
        await asyncio.to_thread(store.delete_file, tenant, source.id)
    return json_response(_shown(made, call))


def _read(call: Call) -> BatchBody:
    try:
        body = validation.parse(BatchBody, call.json)
    except validation.Mismatch as error:
        raise invalid(str(error), error.field or None) from None
    seen: set[str] = set()
    for i, request in enumerate(body.requests):
        if request.custom_id in seen:
            field = f"requests[{i}].custom_id"
            raise invalid(f"{field} is {request.custom_id!r} again: each request needs one of its own", field)
        seen.add(request.custom_id)
    return body


def _write(store: Store, tenant: str, requests: Sequence[BatchRequest], size: int) -> StoredFile:
    """Writes the requests as lines. Raises RequestFailed where there is no room for them, with what stands around."""
    wanted = size + 100 * len(requests)
    name, content, most = store.begin(tenant, wanted)
    try:
        if most < wanted:
            raise no_room("requests")
        for request in requests:
            value = {"custom_id": request.custom_id, "method": "POST", "url": _ENDPOINT, "body": request.params}
            content.write(orjson.dumps(value) + b"\n")
        facts = StoredFile(name, "requests.jsonl", "batch_input", content.tell(), int(time.time()))
        return store.commit(tenant, facts, content)
    except BaseException as error:
        store.drop(tenant, name, content)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room("requests") from None
        raise


async def list_batches(call: Call) -> Response:
    """GET /v1/messages/batches."""
    found = await asyncio.to_thread(store_of(call).batches, call.caller.name, _DIALECT)
    asked = query(call)
    limit = asked.get("limit", "20")
    if not limit.isdecimal() or len(limit) > 4 or not 1 <= int(limit) <= _MOST_LISTED:
        raise invalid(f"limit must be a whole number of 1 to {_MOST_LISTED}, got {limit[:20]!r}", "limit")
    ids = [batch.id for batch in found]
    first = 0
    end = len(found)
    if "after_id" in asked:
        first = _place(ids, asked["after_id"], "after_id") + 1
    if "before_id" in asked:
        end = _place(ids, asked["before_id"], "before_id")
        first = max(first, end - int(limit))
    shown = found[first : min(end, first + int(limit))]
    data = [_shown(batch, call) for batch in shown]
    more = first > 0 if "before_id" in asked else first + len(shown) < len(found)
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return json_response({"data": data, "has_more": more, "first_id": ends[0], "last_id": ends[1]})


def _place(ids: Sequence[str], wanted: str, field: str) -> int:
    if wanted not in ids:
        raise invalid(f"{field} must be an id of the list, got {wanted[:100]!r}", field)
    return ids.index(wanted)


async def show(call: Call) -> Response:
    """GET /v1/messages/batches/{batch_id}."""
    return json_response(_shown(await _found(call), call))


async def cancel(call: Call) -> Response:
    """POST /v1/messages/batches/{batch_id}/cancel."""
    batch = await _found(call)
    if batch.active:
        await asyncio.to_thread(store_of(call).cancel, batch)
    return json_response(_shown(await _found(call), call))


async def delete(call: Call) -> Response:
    """DELETE /v1/messages/batches/{batch_id}."""
    batch = await _found(call)
    if not _ended(batch):
        raise invalid(f"the batch {batch.id} has not ended: cancel it first", "batch_id")
    await asyncio.to_thread(store_of(call).delete_batch, batch)
    return json_response({"id": batch.id, "type": "message_batch_deleted"})


async def read_results(call: Call) -> Response:
    """GET /v1/messages/batches/{batch_id}/results."""
    batch = await _found(call)
    if not _ended(batch):
        raise invalid(f"the batch {batch.id} has not ended: it has results when it has", "batch_id")
    folder = store_of(call).folder_of(batch)
    return StreamingResponse(_results(folder), media_type="application/x-jsonl")


async def _results(folder: Path) -> AsyncIterator[bytes]:
    """Reads results in a thread, piece by piece: they may be gigabytes."""
    pieces = _pieces(folder)
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


def _pieces(folder: Path) -> Iterator[bytes]:
    """The results, many at a time."""
    gathered = bytearray()
    for name in ("output.jsonl", "errors.jsonl"):
        for line in lines.read_results(folder / name):
            gathered += orjson.dumps({"custom_id": line["custom_id"], "result": _result(line)}) + b"\n"
            if len(gathered) >= _PIECE:
                yield bytes(gathered)
                gathered.clear()
    if gathered:
        yield bytes(gathered)


def _result(line: dict[str, Any]) -> dict[str, Any]:
    response = line["response"]
    if response is None:
        return {"type": _UNANSWERED[line["error"]["code"]]}
    if response["status_code"] < 400:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


async def _found(call: Call) -> Batch:
    batch = await asyncio.to_thread(store_of(call).batch, call.caller.name, call.path_params["batch_id"])
    if batch.dialect != _DIALECT:
        raise RequestFailed(ErrorKind.NOT_FOUND, f"there is no batch {batch.id!r} of messages", field="batch_id")
    return batch


def _ended(batch: Batch) -> bool:
    return not batch.active and batch.status != "cancelling"


def _shown(batch: Batch, call: Call) -> dict[str, Any]:
    ended = _ended(batch)
    lost = batch.cancelled + batch.expired
    # A batch whose requests could not be read has no results: each of them counts as an error.
    errored = batch.total if batch.status == "failed" else batch.failed - lost
    times = batch.times
    at_end = next(
        (times[status] for status in ("completed", "cancelled", "expired", "failed") if status in times), None
    )
    url = f"{call.scope['scheme']}://{call.headers.get('host', '')}{_ENDPOINT}/batches/{batch.id}/results"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": {
            "processing": 0 if ended else batch.total - batch.completed - batch.failed,
            "succeeded": batch.completed,
            "errored": errored,
            "canceled": batch.cancelled,
            "expired": batch.expired,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": None if at_end is None else _time(at_end),
        "cancel_initiated_at": _time(times["cancelling"]) if "cancelling" in times else None,
        "archived_at": None,
        "results_url": url if ended else None,
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
