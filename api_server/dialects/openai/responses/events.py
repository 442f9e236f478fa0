"""Writes the stream of /v1/responses: the documented events, item by item."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from api_server.dialects.openai.errors import error_body
from api_server.dialects.openai.responses.rendering import Form, named, part, summary_part
from api_server.dialects.openai.responses.tools import Kind
from api_server.errors import RequestFailed
from api_server.generation.generation import Generation
from api_server.parsers.answer import Call, ParsedAnswer, Passage
from api_server.parsers.scanner import Piece, Thought
from api_server.web.sse import named_frame


class Events:
    """The stream of one answer; its events are numbered from 0."""

    def __init__(self, form: Form, generation: Generation) -> None:
        self._form = form
        self._generation = generation
        self._next = 0
        # Blocks that the client has; the last one is the open item.
        self._sent = ParsedAnswer()

    async def frames(self) -> AsyncIterator[bytes]:
        form = self._form
        choice = self._generation.choices[0]
        begun = form.begun(choice)
        yield self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        async for delta in self._generation:
            events = b"".join(map(self._render, delta.pieces))
            if events:
                yield events
        answer = form.answer(choice)
        empty = b"" if self._sent.blocks else self._begin(Passage(False))
        ended = self._end(answer["output"][-1]["status"])
        yield empty + ended + self._event(f"response.{answer['status']}", response=answer)

    def error_frame(self, error: RequestFailed) -> bytes:
        """The end of a failed stream: the error, and the content until then."""
        detail = error_body(named(error))["error"]
        said = {name: detail[name] for name in ("code", "message", "param")}
        failed = self._form.failed(self._generation.choices[0], error)
        return self._event("error", **said) + self._event("response.failed", response=failed)

    def _render(self, piece: Piece) -> bytes:
        opening = self._open_for(piece)
        self._sent.add([piece])
        block = self._sent.blocks[-1]
        place = self._place()
        if isinstance(piece, Thought):
            thought = opening + self._summary("text.delta", delta=piece.text)
            return thought + self._event("response.reasoning_text.delta", **place, delta=piece.text)
        if isinstance(block, Call):
            if not piece.arguments or self._kind(block) != "function":
                return opening
            return opening + self._event("response.function_call_arguments.delta", **place, delta=piece.arguments)
        return opening + self._event("response.output_text.delta", **place, delta=piece.content, logprobs=[])

    def _open_for(self, piece: Piece) -> bytes:
        """Ends the open item and begins another one, unless the piece continues it."""
        last = self._sent.blocks[-1] if self._sent.blocks else None
        if isinstance(piece, Thought) or piece.content is not None:
            thought = isinstance(piece, Thought)
            if isinstance(last, Passage) and last.is_thought == thought:
                return b""
            ended = self._end("completed") if last else b""
            return ended + self._begin(Passage(thought))
        if piece.name is None:
            return b""
        ended = self._end("completed") if last else b""
        return ended + self._begin(Call(piece.id or "", piece.name))

    def _begin(self, block: Passage | Call) -> bytes:
        index = len(self._sent.blocks)
        if isinstance(block, Passage):
            self._sent.blocks.append(block)
        item = self._form.item(index, block, "in_progress")
        added = self._event("response.output_item.added", output_index=index, item=item)
        if isinstance(block, Call):
            return added
        if block.is_thought:
            added += self._summary("part.added", part=summary_part(""))
        return added + self._event("response.content_part.added", **self._place(), part=part(block))

    def _end(self, status: str) -> bytes:
        index = len(self._sent.blocks) - 1
        block = self._sent.blocks[-1]
        place = self._place()
        if isinstance(block, Call):
            ended = self._end_of_call(block, index)
        elif block.is_thought:
            ended = self._summary("text.done", text=block.text)
            ended += self._summary("part.done", part=summary_part(block.text))
            ended += self._event("response.reasoning_text.done", **place, text=block.text)
        else:
            ended = self._event("response.output_text.done", **place, text=block.text, logprobs=[])
        if isinstance(block, Passage):
            ended += self._event("response.content_part.done", **place, part=part(block))
        item = self._form.item(index, block, status)
        return ended + self._event("response.output_item.done", output_index=index, item=item)

    def _end_of_call(self, block: Call, index: int) -> bytes:
        """The events that end a call. A custom tool's text comes at once; OpenAI's own tools only have item events."""
        place = self._place()
        item = self._form.item(index, block, "completed")
        match self._kind(block):
            case "function":
                facts = {"name": item["name"], "arguments": item["arguments"]}
                return self._event("response.function_call_arguments.done", **place, **facts)
            case "custom":
                said = item["input"]
                delta = self._event("response.custom_tool_call_input.delta", **place, delta=said) if said else b""
                return delta + self._event("response.custom_tool_call_input.done", **place, input=said)
        return b""

    def _kind(self, block: Call) -> Kind:
        return self._form.tools.kind_of(block.name)

    def _summary(self, kind: str, **facts: Any) -> bytes:
        """An event of the summary, if one is wanted; the summary is the reasoning itself."""
        if not self._form.summary:
            return b""
        place = self._place()
        del place["content_index"]
        return self._event(f"response.reasoning_summary_{kind}", **place, summary_index=0, **facts)

    def _place(self) -> dict[str, Any]:
        """The item, and its part, that an event belongs to."""
        index = len(self._sent.blocks) - 1
        block = self._sent.blocks[-1]
        place = {"item_id": self._form.item_id(index, block), "output_index": index}
        return place if isinstance(block, Call) else place | {"content_index": 0}

    def _event(self, kind: str, **facts: Any) -> bytes:
        number = self._next
        self._next += 1
        return named_frame({"type": kind, "sequence_number": number, **facts})
