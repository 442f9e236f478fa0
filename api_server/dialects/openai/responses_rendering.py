"""Writes the answer of /v1/responses, whole or as the documented events, from the facts of a generation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from api_server.dialects.openai.errors import error_body
from api_server.dialects.openai.responses_schema import ResponsesBody
from api_server.errors import ErrorKind, RequestFailed
from api_server.generation import Choice, Generation, complete
from api_server.sse import named_frame

_NAMES = {"max_new_tokens": "max_output_tokens", "min_new_tokens": "min_tokens", "prompt": "input"}


def named(error: RequestFailed) -> RequestFailed:
    """The error with this endpoint's names of fields. A refused field is one of its own: it has a `prompt`, too."""
    return error if error.kind is ErrorKind.UNSUPPORTED else error.renamed(_NAMES)


@dataclass(frozen=True)
class Form:
    """What the answer to one request repeats of it."""

    request_id: str
    model: str
    body: ResponsesBody
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def item_id(self) -> str:
        return f"msg_{self.request_id}_0"

    def answer(self, choice: Choice) -> dict[str, Any]:
        """The finished resource."""
        return self._resource(
            choice,
            _status(choice),
            output=[self.item(_status(choice), [part(choice.text)])],
            usage=_usage(choice),
            completed_at=int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if _status(choice) == "incomplete" else None,
        )

    def begun(self, choice: Choice) -> dict[str, Any]:
        return self._resource(choice, "in_progress")

    def failed(self, choice: Choice, error: RequestFailed) -> dict[str, Any]:
        code = "rate_limit_exceeded" if error.kind is ErrorKind.OVERLOADED else "server_error"
        output = [self.item("incomplete", [part(choice.text)])]
        return self._resource(choice, "failed", output=output, error={"code": code, "message": error.message})

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _resource(self, choice: Choice, status: str, **news: Any) -> dict[str, Any]:
        body = self.body
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": choice.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": choice.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        } | news


class Events:
    """The stream of one answer; its events are numbered from 0."""

    def __init__(self, form: Form, generation: Generation) -> None:
        self._form = form
        self._generation = generation
        self._next = 0

    async def frames(self) -> AsyncIterator[bytes]:
        form, choice = self._form, self._generation.choices[0]
        place = {"item_id": form.item_id, "output_index": 0, "content_index": 0}
        begun = form.begun(choice)
        yield (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=form.item("in_progress", []))
            + self._event("response.content_part.added", **place, part=part(""))
        )
        async for delta in self._generation:
            if delta.text:
                yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
        answer = form.answer(choice)
        yield (
            self._event("response.output_text.done", **place, text=choice.text, logprobs=[])
            + self._event("response.content_part.done", **place, part=part(choice.text))
            + self._event("response.output_item.done", output_index=0, item=answer["output"][0])
            + self._event(f"response.{answer['status']}", response=answer)
        )

    def error_frame(self, error: RequestFailed) -> bytes:
        """What ends a stream that failed: the error, and what had been said by then."""
        detail = error_body(named(error))["error"]
        said = {name: detail[name] for name in ("code", "message", "param")}
        failed = self._form.failed(self._generation.choices[0], error)
        return self._event("error", **said) + self._event("response.failed", response=failed)

    def _event(self, kind: str, **facts: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        return named_frame({"type": kind, "sequence_number": number, **facts})


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(choice: Choice) -> str:
    return "incomplete" if complete(choice.finish).kind == "length" else "completed"


def _usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens},
        "output_tokens": choice.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": choice.prompt_tokens + choice.completion_tokens,
    }
