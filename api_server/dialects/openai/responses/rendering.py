"""Writes the answer of /v1/responses from the facts of a generation: items of reasoning, text and calls."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from api_server.answers.choice import Choice, complete
from api_server.dialects.openai.responses.input import ENCRYPTED
from api_server.dialects.openai.responses.schema import ResponsesBody
from api_server.dialects.openai.responses.tools import Kind, Toolbox
from api_server.errors import ErrorKind, RequestFailed
from api_server.parsers.answer import Block, Call, Passage
from api_server.text.sealed_text import Seal
from interfaces import SamplingParams

_NAMES = {"max_new_tokens": "max_output_tokens", "min_new_tokens": "min_tokens", "prompt": "input"}


def named(error: RequestFailed) -> RequestFailed:
    """The error with this endpoint's names of fields. A refused field keeps its name: `prompt` is one here, too."""
    return error if error.kind is ErrorKind.UNSUPPORTED else error.renamed(_NAMES)


@dataclass(frozen=True)
class Form:
    """The fields of a request that its answer repeats."""

    request_id: str
    model: str
    body: ResponsesBody
    tools: Toolbox
    seal: Seal
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, choice: Choice) -> dict[str, Any]:
        """The finished resource."""
        status = _status(choice)
        return self.resource(
            status,
            choice.sampling,
            output=self.items(choice, status),
            usage=_usage(choice),
            completed_at=self.now(),
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
        )

    def begun(self, choice: Choice) -> dict[str, Any]:
        return self.resource("in_progress", choice.sampling)

    def failed(self, choice: Choice, error: RequestFailed) -> dict[str, Any]:
        code = "rate_limit_exceeded" if error.kind is ErrorKind.OVERLOADED else "server_error"
        output = self.items(choice, "incomplete")
        return self.resource("failed", choice.sampling, output=output, error={"code": code, "message": error.message})

    def items(self, choice: Choice, status: str) -> list[dict[str, Any]]:
        """The output items; only the last one can be incomplete, and an empty answer is one empty text."""
        blocks = choice.answer.blocks or [Passage(False)]
        last = len(blocks) - 1
        return [self.item(i, block, status if i == last else "completed") for i, block in enumerate(blocks)]

    def item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        """An output item. One in progress has no content yet."""
        begun = status == "in_progress"
        common = {"id": self.item_id(index, block), "status": status}
        if isinstance(block, Call):
            return common | self.tools.item(block.parsed, begun)
        content = [] if begun else [part(block)]
        if block.is_thought:
            return common | {"type": "reasoning", "summary": [], "content": content} | self._further(block, begun)
        return common | {"type": "message", "role": "assistant", "content": content}

    def item_id(self, index: int, block: Block) -> str:
        if isinstance(block, Call):
            prefix = _PREFIXES[self.tools.kind_of(block.name)]
        else:
            prefix = "rs" if block.is_thought else "msg"
        return f"{prefix}_{self.request_id}_{index}"

    @property
    def summary(self) -> str | None:
        """The kind of summary that was asked for; every kind is the whole reasoning, which is not secret here."""
        reasoning = self.body.reasoning
        return None if reasoning is None else reasoning.wanted_summary

    def _further(self, block: Passage, begun: bool) -> dict[str, Any]:
        """Further fields of a reasoning item that the request asked for."""
        more: dict[str, Any] = {}
        if self.summary and not begun:
            more["summary"] = [summary_part(block.text)]
        if ENCRYPTED in (self.body.include or ()) and not begun:
            more["encrypted_content"] = self.seal.sealed(block.text)
        return more

    @staticmethod
    def now() -> int:
        return int(time.time())

    def resource(self, status: str, sampling: SamplingParams | None = None, **changes: Any) -> dict[str, Any]:
        """The resource with its changes. `sampling` is that of its text; None where none is generated."""
        body = self.body
        sampling = sampling or SamplingParams()
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": self.summary},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        } | changes


_PREFIXES: dict[Kind, str] = {
    "function": "fc",
    "custom": "ctc",
    "shell": "sh",
    "local_shell": "lsh",
    "apply_patch": "apc",
}


def summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def part(block: Passage) -> dict[str, Any]:
    """The one part of an item's content."""
    if block.is_thought:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _status(choice: Choice) -> str:
    return "incomplete" if complete(choice.finish).kind == "length" else "completed"


def _usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens},
        "output_tokens": choice.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": choice.prompt_tokens + choice.completion_tokens,
    }
