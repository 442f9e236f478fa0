"""The tool image_generation of /v1/responses, where the client chooses it: the last message is painted.

A model of this server that paints does it; the model of the request writes nothing. Knows OpenAI's JSON forms.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import orjson
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from api_server.body.validation import Mismatch, parse
from api_server.dialects.openai import images
from api_server.dialects.openai.errors import error_body
from api_server.dialects.openai.first_event import begun
from api_server.dialects.openai.responses import input
from api_server.dialects.openai.responses.rendering import Form, named
from api_server.dialects.openai.responses.schema import ResponsesBody
from api_server.dialects.openai.schema import LONGEST_NAME, Body
from api_server.errors import RequestFailed, invalid, unsupported
from api_server.pixels.encoding import Format, encoded
from api_server.pixels.painting import Painting, paint
from api_server.pixels.reading import MOST_SEED
from api_server.pixels.wish import Wish
from api_server.state import ServerState
from api_server.text.sealed_text import Seal
from api_server.web.endpoint import Call
from api_server.web.sse import EventStream, named_frame

KIND = "image_generation"


class ImageTool(Body):
    """The fields of the tool."""

    type: Literal["image_generation"]
    model: str | None = Field(None, max_length=LONGEST_NAME, description="A model of this server that paints")
    size: str | None = Field(None, max_length=LONGEST_NAME, description="auto, or width and height, as in 512x768")
    output_format: Format | None = Field(None, description="The file's format; default: png")
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp; default: 100")
    partial_images: int | None = Field(None, ge=0, le=images.MOST_PREVIEWS, description="Previews in a stream")
    quality: Literal["auto", "standard", "medium"] | None = Field(None, description="Accepted, without effect")
    background: Literal["auto", "opaque"] | None = Field(None, description="Images are opaque")
    moderation: Literal["auto", "low"] | None = Field(None, description="Accepted, without effect")
    action: Literal["auto", "generate"] | None = Field(None, description="Images are painted anew")
    seed: int | None = Field(None, ge=0, le=MOST_SEED, description="Seed of the noise")

    @property
    def kind(self) -> Format:
        return self.output_format or "png"

    @property
    def compression(self) -> int:
        return 100 if self.output_compression is None else self.output_compression


def is_chosen(body: ResponsesBody) -> bool:
    """Whether the client has chosen the tool. Where the model could choose, it is not offered."""
    return isinstance(body.tool_choice, Mapping) and body.tool_choice.get("type") == KIND


async def answered(call: Call, body: ResponsesBody, form: Form) -> Response:
    """The answer, or its stream. Raises RequestFailed."""
    tool = _tool(body)
    prompt = await call.apart(lambda: _prompt(body, call.server.seal))
    painter = _painter(call, tool)
    previews = (tool.partial_images or 0) if body.stream else 0
    wish = Wish(prompt=prompt, size=tool.size, seed=tool.seed, previews=previews)
    # To metrics it is a request of the route for images.
    painting = await paint(replace(call, server=painter, scope={**call.scope, "path": "/v1/images/generations"}), wish)
    painted = _Painted(form, tool, prompt, painting)
    if body.stream:
        frames = await begun(painted.frames(), painting.close)
        return EventStream(frames, painting.close, painted.error_frame)
    try:
        (image,) = [image async for image in painting.images()]
    finally:
        painting.close()
    return Response(await asyncio.to_thread(painted.answer, image), media_type="application/json")


class _Painted:
    """The answer to one request, as a whole or as events, which are numbered from 0."""

    def __init__(self, form: Form, tool: ImageTool, prompt: str, painting: Painting) -> None:
        self._form = form
        self._tool = tool
        self._prompt = prompt
        self._painting = painting
        self._item_id = f"ig_{form.request_id}_0"
        self._next = 0

    def answer(self, image: NDArray[Any]) -> bytes:
        return orjson.dumps(self._finished(self._item("completed", self._file(image))))

    async def frames(self) -> AsyncIterator[bytes]:
        resource = self._form.resource("in_progress")
        place = {"item_id": self._item_id, "output_index": 0}
        start = self._event("response.created", response=resource)
        start += self._event("response.in_progress", response=resource)
        start += self._event("response.output_item.added", output_index=0, item=self._item("in_progress", None))
        start += self._event("response.image_generation_call.in_progress", **place)
        # The first bytes follow the first image, so that what fails before has a status of its own.
        start += self._event("response.image_generation_call.generating", **place)
        async for number, pixels in self._painting.with_previews():
            file = await asyncio.to_thread(self._file, pixels)
            if number:
                facts = {"partial_image_index": number - 1, "partial_image_b64": file}
                yield start + self._event("response.image_generation_call.partial_image", **place, **facts)
            else:
                item = self._item("completed", file)
                ended = self._event("response.image_generation_call.completed", **place)
                ended += self._event("response.output_item.done", output_index=0, item=item)
                yield start + ended + self._event("response.completed", response=self._finished(item))
            start = b""

    def error_frame(self, error: RequestFailed) -> bytes:
        """The end of a failed stream."""
        detail = error_body(named(error))["error"]
        said = {name: detail[name] for name in ("code", "message", "param")}
        failure = {"code": "server_error", "message": error.message}
        failed = self._form.resource("failed", output=[self._item("failed", None)], error=failure)
        return self._event("error", **said) + self._event("response.failed", response=failed)

    def _file(self, image: NDArray[Any]) -> str:
        return base64.b64encode(encoded(image, self._tool.kind, self._tool.compression)).decode()

    def _finished(self, item: dict[str, Any]) -> dict[str, Any]:
        found = images.usage_of(self._painting)
        usage = {
            **{name: found[name] for name in ("input_tokens", "output_tokens", "total_tokens")},
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return self._form.resource("completed", output=[item], usage=usage, completed_at=self._form.now())

    def _item(self, status: str, file: str | None) -> dict[str, Any]:
        facts = images.facts_of(self._painting, self._tool.kind)
        return {
            "id": self._item_id,
            "type": "image_generation_call",
            "status": status,
            "result": file,
            "revised_prompt": self._prompt,
            **facts,
        }

    def _event(self, kind: str, **facts: Any) -> bytes:
        number = self._next
        self._next += 1
        return named_frame({"type": kind, "sequence_number": number, **facts})


def _tool(body: ResponsesBody) -> ImageTool:
    """The tool's fields. Raises RequestFailed."""
    for i, given in enumerate(body.tools or ()):
        if isinstance(given, Mapping) and given.get("type") == KIND:
            try:
                return parse(ImageTool, given)
            except Mismatch as mismatch:
                raise invalid(f"tools[{i}].{mismatch}", f"tools[{i}].{mismatch.field}") from None
    raise invalid("tool_choice names image_generation, which tools does not have: add it there", "tool_choice")


def _prompt(body: ResponsesBody, seal: Seal) -> str:
    """The text of the last message. Raises RequestFailed."""
    last = input.messages(body, seal)[-1]
    try:
        text = last.text if last.role == "user" else ""
    except ValueError as error:
        raise invalid(
            f"input: only texts can be painted here, and {error}; images go to /v1/images/edits", "input"
        ) from None
    if not text.strip():
        raise invalid("input must end with a user's text: what to paint", "input")
    if len(text) > images.MOST_CHARACTERS:
        raise invalid(
            f"input: the last text has {len(text)} characters, and at most {images.MOST_CHARACTERS} can be painted",
            "input",
        )
    return text


def _painter(call: Call, tool: ImageTool) -> ServerState:
    """The state of the model that paints. Raises RequestFailed."""
    if tool.model is not None:
        return call.server.of_model(tool.model, None)
    able = (state for state in call.server.models if state.pooled_model is not None and state.pooled_model.pixels)
    painter = next(able, None)
    if painter is None:
        raise unsupported(
            "tool_choice", "image_generation without a model that paints (start it with --also NAME=MODEL)"
        )
    return painter
