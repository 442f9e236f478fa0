"""What /v1/responses takes as a conversation, and which of its documented fields this server refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api_server import documents
from api_server.chat_messages import chat_messages, text_content
from api_server.dialects.openai.responses_schema import ResponsesBody
from api_server.documents import Document
from api_server.errors import invalid, unsupported
from api_server.refusals import Refusals
from api_server.state import ServerState
from interfaces.chat import TextGenerationRequestMessage

REFUSED: Refusals = {
    "store": ("keeping answers for later", (None, False)),
    "previous_response_id": ("continuing a kept answer (send the whole conversation as input)", (None,)),
    "conversation": ("keeping conversations (send the whole conversation as input)", (None,)),
    "background": ("answering in the background", (None, False)),
    "prompt": ("a stored prompt", (None,)),
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
    "response_format": ("this name of text.format", (None, {"type": "text"})),
}

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def check(raw: Mapping[str, Any]) -> None:
    """Refuses what hides inside of fields. Raises RequestFailed(UNSUPPORTED)."""
    reasoning = raw.get("reasoning")
    if isinstance(reasoning, Mapping) and any(reasoning.get(name) for name in ("summary", "generate_summary")):
        raise unsupported("reasoning.summary", "reasoning apart from the answer")


async def load_documents(server: ServerState, given: ResponsesBody) -> None:
    """Makes texts of the files in the input. Raises RequestFailed."""
    if not isinstance(given.input, str):
        await documents.load(server, given.input, "input", _input_file)


def _input_file(part: Mapping[str, Any], path: str) -> Document | None:
    return documents.file_fields(part, path) if part.get("type") == "input_file" else None


def messages(given: ResponsesBody) -> list[TextGenerationRequestMessage]:
    """Raises RequestFailed for the first item that cannot be read."""
    before = [] if given.instructions is None else [{"role": "system", "content": given.instructions}]
    if isinstance(given.input, str):
        return chat_messages([*before, {"role": "user", "content": given.input}])
    turns: list[dict[str, Any]] = before
    thought = ""
    for i, item in enumerate(given.input):
        path = f"input[{i}]"
        if item.get("type") == "reasoning":
            thought += _thought(item, path)
            continue
        turn = _turn(item, path)
        if turn["role"] == "assistant":
            if thought:
                turn["reasoning_content"], thought = thought, ""
            if "tool_calls" in turn and turns and turns[-1]["role"] == "assistant":
                # A message and the calls that followed it were one answer.
                turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
                continue
        turns.append(turn)
    return chat_messages(turns)


def _turn(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = item.get("type")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        if not isinstance(function["name"], str):
            raise invalid(f"{path}.name is missing: the name of the function", f"{path}.name")
        return {"role": "assistant", "content": None, "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    if kind == "function_call_output":
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise invalid(f"{path}.call_id is missing: the id of the call that this answers", f"{path}.call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"), f"{path}.output")}
    if kind not in (None, "message"):
        raise unsupported(f"{path}.type", f"an item of type {kind!r}")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(_ROLES)}, got {role!r:.100}", f"{path}.role")
    if content is None:
        raise invalid(f"{path}.content is missing", f"{path}.content")
    return {"role": role, "content": _content(content, f"{path}.content")}


def _content(given: Any, path: str) -> Any:
    """A text, or parts in the form of chats."""
    found = text_content(given, path, _PARTS)
    return found if isinstance(found, str) else [part.model_dump() for part in found]


def _thought(item: Mapping[str, Any], path: str) -> str:
    """What a reasoning item says; only a summary, or an encrypted one, says nothing here."""
    content = item.get("content") or []
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise invalid(f"{path}.content must be a list of parts", f"{path}.content")
    return "".join(str(part.get("text", "")) for part in content)
