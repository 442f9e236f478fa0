"""/v1/files: files of a key, which batches read and write. Uploads go to the disk as they come."""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from api_server.batches import lines
from api_server.batches.records import StoredFile
from api_server.batches.store import Store, no_room
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.web.endpoint import Call, Document, discard_body, endpoint
from api_server.web.json_bodies import json_response
from api_server.web.read_body import ClientGone

TAG = "openai"
MOST_LISTED = 10_000
# Most bytes of a field of the form beside the file.
_LONGEST_FIELD = 1024
_SHORTEST_LIFE = 3600
_LONGEST_LIFE = 30 * 24 * 3600
_NAME = re.compile(r"[^\x00-\x1f/\\]{1,255}")
_ERRORS = dict.fromkeys((400, 404), ErrorAnswer)


class FileObject(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


def routes() -> list[BaseRoute]:
    listed = Document("Files of this key", TAG, answer=FileList, errors=_ERRORS)
    shown = Document("A file", TAG, answer=FileObject, errors=_ERRORS)
    deleted = Document("Delete a file", TAG, answer=Deleted, errors=_ERRORS)
    content = Document("The content of a file", TAG, errors=_ERRORS)
    return [
        endpoint("/v1/files", list_files, render_error, ("GET",), listed),
        Route("/v1/files", Upload(), methods=["POST"]),
        endpoint("/v1/files/{file_id}", show, render_error, ("GET",), shown),
        endpoint("/v1/files/{file_id}", delete, render_error, ("DELETE",), deleted),
        endpoint("/v1/files/{file_id}/content", read_content, render_error, ("GET",), content),
    ]


def store_of(call: Call) -> Store:
    """The store. Raises RequestFailed(NOT_FOUND) for a server that has none."""
    store = call.server.store
    if store is None:
        raise RequestFailed(ErrorKind.NOT_FOUND, "this server keeps no files: its operator may set --batch-dir")
    return store


async def list_files(call: Call) -> Response:
    """GET /v1/files."""
    store = store_of(call)
    found = await asyncio.to_thread(store.files, call.caller.name)
    purpose = query(call).get("purpose")
    wanted = [file for file in found if purpose in (None, file.purpose)]
    if query(call).get("order") == "asc":
        wanted.reverse()
    return page([_shown(file) for file in wanted], query(call), MOST_LISTED, MOST_LISTED)


async def show(call: Call) -> Response:
    """GET /v1/files/{file_id}."""
    file = await asyncio.to_thread(store_of(call).file, call.caller.name, call.path_params["file_id"])
    return json_response(_shown(file))


async def delete(call: Call) -> Response:
    """DELETE /v1/files/{file_id}."""
    name = call.path_params["file_id"]
    await asyncio.to_thread(store_of(call).delete_file, call.caller.name, name)
    return json_response({"id": name, "object": "file", "deleted": True})


async def read_content(call: Call) -> Response:
    """GET /v1/files/{file_id}/content."""
    path = await asyncio.to_thread(store_of(call).content, call.caller.name, call.path_params["file_id"])
    return FileResponse(path, media_type="application/jsonl")


def query(call: Call) -> dict[str, str]:
    """The values behind the question mark."""
    from urllib.parse import parse_qsl

    return dict(parse_qsl(call.scope["query_string"].decode("latin-1")))


def page(found: Sequence[dict[str, Any]], asked: dict[str, str], default: int, most: int) -> Response:
    """A page of a list, from behind the entry `after`. Raises RequestFailed."""
    limit = asked.get("limit", str(default))
    if not limit.isdecimal() or len(limit) > 6 or not 1 <= int(limit) <= most:
        raise invalid(f"limit must be a whole number of 1 to {most}, got {limit[:20]!r}", "limit")
    after = asked.get("after")
    start = 0
    if after is not None:
        place = next((i for i, entry in enumerate(found) if entry["id"] == after), None)
        if place is None:
            raise invalid(f"after must be an id of the list, got {after[:100]!r}", "after")
        start = place + 1
    data = list(found[start : start + int(limit)])
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = start + len(data) < len(found)
    return json_response({"object": "list", "data": data, "has_more": more, "first_id": ends[0], "last_id": ends[1]})


class Upload:
    """POST /v1/files: a form with `file`, `purpose` and perhaps `expires_after`."""

    document = Document(
        "Upload a file",
        TAG,
        answer=FileObject,
        errors=_ERRORS | {413: ErrorAnswer},
        description="The body is a form (multipart/form-data) with `file`, `purpose` (batch), and perhaps "
        "`expires_after[anchor]` (created_at) and `expires_after[seconds]`.",
    )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        call = Call(state["server"], scope, b"", state["request_id"])
        body = _Body(receive)
        try:
            response = json_response(_shown(await _receive(call, body)))
        except ClientGone:
            return
        except RequestFailed as error:
            if body.more:
                await discard_body(scope, receive)
            call.server.record_failure(call.route_path, error)
            response = render_error(error, call)
        await response(scope, receive, send)


class _Body:
    """A body that is read piece by piece. `more` is False when all of it is there."""

    def __init__(self, receive: Receive) -> None:
        self.more = True
        self._receive = receive

    async def read(self) -> bytes:
        """The next piece. Raises ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.more = message.get("more_body", False)
        data: bytes = message.get("body", b"")
        return data


async def _receive(call: Call, body: _Body) -> StoredFile:
    """Writes an upload. Raises RequestFailed, and ClientGone."""
    store = store_of(call)
    tenant = call.caller.name
    length = call.headers.get("content-length", "")
    wanted = min(int(length), lines.MOST_BYTES) if length.isdecimal() and len(length) < 16 else lines.MOST_BYTES
    name, content, most = await asyncio.to_thread(store.begin, tenant, max(1, wanted))
    try:
        form = _Form(call.headers.get("content-type", ""), content, most)
        while body.more:
            await asyncio.to_thread(form.feed, await body.read())
        facts = form.finish(name)
        return await asyncio.to_thread(store.commit, tenant, facts, content)
    except BaseException as error:
        await asyncio.to_thread(store.drop, tenant, name, content)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room("file") from None
        raise


class _Form:
    """A multipart form whose file goes to the disk, and whose fields are short."""

    def __init__(self, content_type: str, content: BinaryIO, most: int) -> None:
        # Loaded for the first upload: most servers never have one.
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            what = f"the content type must be multipart/form-data with a boundary, got {content_type[:100]!r}"
            raise RequestFailed(ErrorKind.BAD_MEDIA_TYPE, what)
        self._options_of = parse_options_header
        self._content = content
        self._most = most
        self._size = 0
        self._fields: dict[str, bytearray] = {}
        self._filename = ""
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._part = ""
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_part,
                    "on_part_data": self._take,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise invalid(f"the form's boundary cannot be used: {error}") from None
        self._complete = False

    def feed(self, data: bytes) -> None:
        """Reads more of the form. Raises RequestFailed."""
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except FormParserError as error:
            raise invalid(f"the form is broken: {error}") from None

    def finish(self, name: str) -> StoredFile:
        """The facts of the file. Raises RequestFailed for a form that lacks something."""
        if not self._complete:
            raise invalid("the form is not complete")
        if not self._filename:
            raise invalid("file is missing: send it as a part of the form, with a name", "file")
        purpose = self._fields.get("purpose", bytearray()).decode("utf-8", "replace")
        if purpose != "batch":
            raise invalid(f"purpose must be batch, got {purpose[:100]!r}", "purpose")
        now = int(time.time())
        seconds = self._seconds()
        ends = None if seconds is None else now + seconds
        return StoredFile(name, self._filename, purpose, self._size, now, ends)

    def _seconds(self) -> int | None:
        given = self._fields.get("expires_after[seconds]")
        if given is None:
            return None
        anchor = self._fields.get("expires_after[anchor]", bytearray(b"created_at"))
        if anchor != b"created_at":
            raise invalid("expires_after[anchor] must be created_at", "expires_after[anchor]")
        text = given.decode("latin-1")
        seconds = int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else 0
        if not _SHORTEST_LIFE <= seconds <= _LONGEST_LIFE:
            field = "expires_after[seconds]"
            raise invalid(f"{field} must be {_SHORTEST_LIFE} to {_LONGEST_LIFE}, got {text[:20]!r}", field)
        return seconds

    def _begin(self) -> None:
        self._disposition = b""

    def _end_header(self) -> None:
        name, value = (bytes(part) for part in self._header)
        self._header = [bytearray(), bytearray()]
        if name.lower() == b"content-disposition":
            self._disposition = value

    def _name_part(self) -> None:
        _, options = self._options_of(self._disposition)
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part == "file":
            if self._filename:
                raise invalid("file: the form has two", "file")
            filename = Path(options.get(b"filename", b"file").decode("utf-8", "replace")).name
            self._filename = filename if _NAME.fullmatch(filename) else "file"
        elif len(self._fields) < 16:
            self._fields[self._part[:100]] = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self._size += end - start
            if self._size > self._most:
                message = f"the file is larger than {self._most} bytes, which is what fits: split it, or delete others"
                raise RequestFailed(ErrorKind.BODY_TOO_LARGE, message, field="file")
            self._content.write(data[start:end])
        elif (field := self._fields.get(self._part[:100])) is not None and len(field) < _LONGEST_FIELD:
            field.extend(data[start:end])

    def _end(self) -> None:
        self._complete = True


def _shown(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
