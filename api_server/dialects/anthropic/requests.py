"""Reads the bodies of Anthropic's Messages API and maps them to the internal request.

Whatever a body asks for and this server cannot do is refused by name: nothing that changes an answer is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from api_server import body, refusals
from api_server.chat_messages import text_content
from api_server.dialects.anthropic.schema import Conversation, MessagesBody
from api_server.endpoint import Call
from api_server.errors import invalid, unsupported
from api_server.refusals import Refusals
from interfaces.chat import TextContentPart, TextGenerationRequestMessage
from interfaces.request_id import RequestID
from interfaces.requests import TextGenerationRequest
from interfaces.sampling import SamplingParamsInput

B = TypeVar("B", bound=Conversation)

REFUSED: Refusals = {
    "tools": ("calling tools", (None, [])),
    "tool_choice": ("calling tools", (None, {"type": "auto"}, {"type": "none"})),
    "mcp_servers": ("calling tools", (None, [])),
    "container": ("running code", (None,)),
    "output_config": ("output in a prescribed form or effort", (None, {})),
    "output_format": ("output in a prescribed form", (None,)),
    "context_management": ("editing the context", (None, {})),
    "diagnostics": ("explaining cache misses", (None,)),
    "speed": ("a faster mode", (None, "standard")),
}
"""Fields that are documented and not built."""

_WITHOUT_EFFECT = frozenset({"cache_control", "service_tier", "inference_geo", "betas"})
"""Prompts are cached without being asked, and there is one tier in one place."""

_ROLES = ("user", "assistant", "system")
_BLOCKS = {"text": "text"}


def read(call: Call, model: type[B]) -> B:
    """The body, checked. Raises RequestFailed."""
    raw = call.json
    refusals.check(raw, REFUSED, {*MessagesBody.model_fields, *_WITHOUT_EFFECT})
    thinking = raw.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive"):
        raise unsupported("thinking", "thinking apart from the answer")
    try:
        parsed = body.parse(model, raw)
    except body.Mismatch as error:
        raise invalid(str(error), error.field or None) from None
    call.server.check_model(parsed.model or "")
    return parsed


def request(call: Call, given: Conversation) -> TextGenerationRequest:
    """The conversation as one internal request; its length and sampling if it is to be answered."""
    turns = _turns(given.messages)
    system = [] if not given.system else [_message("system", _parts(given.system, "system"))]
    return TextGenerationRequest(
        request_id=RequestID(call.request_id),
        model_name=call.server.model_name,
        messages=[*system, *turns],
        sampling=_sampling(given) if isinstance(given, MessagesBody) else None,
        clamp_max_new_tokens=True,
        continue_final_message=turns[-1].role == "assistant",
        chat_template_options=None if given.thinking is None else {"enable_thinking": False},
        request_path=call.path,
        received=call.received,
    )


def _sampling(given: MessagesBody) -> SamplingParamsInput:
    return SamplingParamsInput(
        max_new_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        stop=given.stop_sequences,
    )


def _turns(given: Sequence[Any]) -> list[TextGenerationRequestMessage]:
    """Messages of one role in a row are one turn; an empty last one of the assistant is none at all."""
    last = len(given) - 1
    read = [_turn(message, f"messages[{i}]", i == last) for i, message in enumerate(given)]
    turns = [
        _message(role, [part for _, parts in group for part in parts])
        for role, group in groupby((turn for turn in read if turn[1]), key=lambda turn: turn[0])
    ]
    if not turns:
        raise invalid("messages must have a turn that is not empty", "messages")
    if turns[-1].role == "assistant" and turns[-1].text != turns[-1].text.rstrip():
        path = f"messages[{last}].content"
        raise invalid(f"{path}: the final assistant content cannot end with trailing whitespace: strip it", path)
    return turns


def _turn(given: Any, path: str, last: bool) -> tuple[str, list[TextContentPart]]:
    role = given.get("role")
    if role not in _ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(_ROLES)}, got {role!r}", f"{path}.role")
    content = given.get("content")
    if last and role == "assistant" and content in ("", []):
        return role, []
    return role, _parts(content, f"{path}.content")


def _parts(given: Any, path: str) -> list[TextContentPart]:
    content = text_content(given, path, _BLOCKS)
    parts = [TextContentPart(text=content)] if isinstance(content, str) else content
    if not parts or not all(isinstance(part, TextContentPart) and part.text for part in parts):
        raise invalid(f"{path} must not be empty, nor any text in it", path)
    return [part for part in parts if isinstance(part, TextContentPart)]


def _message(role: Any, parts: Sequence[TextContentPart]) -> TextGenerationRequestMessage:
    return TextGenerationRequestMessage(role=role, content=list(parts))
