"""What /v1/responses takes as a conversation, and which of its documented fields this server refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api_server.chat_messages import text_content
from api_server.dialects.openai.responses_schema import ResponsesBody
from api_server.errors import invalid, unsupported
from api_server.refusals import Refusals
from interfaces.chat import TextGenerationRequestMessage

REFUSED: Refusals = {
    "store": ("keeping answers for later", (None, False)),
    "previous_response_id": ("continuing a kept answer (send the whole conversation as input)", (None,)),
    "conversation": ("keeping conversations (send the whole conversation as input)", (None,)),
    "background": ("answering in the background", (None, False)),
    "prompt": ("a stored prompt", (None,)),
    "tools": ("calling tools", (None, [])),
    "include": ("adding to the answer", (None, [])),
    "truncation": ("dropping turns that do not fit", (None, "disabled")),
    "context_management": ("editing the context", (None, [])),
    "moderation": ("moderation", (None,)),
    "logprobs": ("log probabilities", (None, False)),
    "top_logprobs": ("log probabilities", (None, 0)),
    "n": ("more than one answer", (None, 1)),
    "messages": ("this name of input", (None,)),
    "max_tokens": ("this name of max_output_tokens", (None,)),
    "max_completion_tokens": ("this name of max_output_tokens", (None,)),
    "response_format": ("output in a prescribed form", (None, {"type": "text"})),
}

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def check(raw: Mapping[str, Any]) -> None:
    """Refuses what hides inside of fields. Raises RequestFailed(UNSUPPORTED)."""
    text, reasoning = raw.get("text"), raw.get("reasoning")
    if isinstance(text, Mapping) and text.get("format") not in (None, {"type": "text"}):
        raise unsupported("text.format", "output in a prescribed form")
    if isinstance(reasoning, Mapping) and any(reasoning.get(name) for name in ("summary", "generate_summary")):
        raise unsupported("reasoning.summary", "reasoning apart from the answer")


def messages(given: ResponsesBody) -> list[TextGenerationRequestMessage]:
    """Raises RequestFailed for the first item that is no message of text."""
    before = [] if given.instructions is None else [_message("system", given.instructions)]
    if isinstance(given.input, str):
        return [*before, _message("user", given.input)]
    return before + [_item(item, f"input[{i}]") for i, item in enumerate(given.input)]


def _item(item: Mapping[str, Any], path: str) -> TextGenerationRequestMessage:
    kind, role, content = item.get("type"), item.get("role"), item.get("content")
    if kind not in (None, "message"):
        raise unsupported(f"{path}.type", f"an item of type {kind!r}")
    if role not in _ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(_ROLES)}, got {role!r}", f"{path}.role")
    if content is None:
        raise invalid(f"{path}.content is missing", f"{path}.content")
    return _message(role, text_content(content, f"{path}.content", _PARTS))


def _message(role: Any, content: Any) -> TextGenerationRequestMessage:
    return TextGenerationRequestMessage(role=role, content=content)
