"""The conversation forms of /v1/responses, and the documented fields that this server refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api_server.body import item_limits
from api_server.body.unknown_fields import ALWAYS, Refusals, report, unless
from api_server.chat import documents, images, sounds, videos
from api_server.chat.documents import Document
from api_server.chat.messages import chat_messages, last_answer
from api_server.dialects.openai.responses.items import content, turns_of
from api_server.dialects.openai.responses.schema import ResponsesBody
from api_server.errors import invalid, unsupported
from api_server.state import ServerState
from api_server.text.sealed_text import Seal
from interfaces import TextGenerationRequestMessage

ENCRYPTED = "reasoning.encrypted_content"

# Values of `include`: reasoning for later, and facts of items that answers of this server do not have.
_NOTHING_TO_ADD = frozenset(
    {
        ENCRYPTED,
        "web_search_call.action.sources",
        "web_search_call.results",
        "file_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)

REFUSED: Refusals = {
    "previous_response_id": ("continuing a kept answer (send the whole conversation as input)", ALWAYS),
    "conversation": ("keeping conversations (send the whole conversation as input)", ALWAYS),
    "background": ("answering in the background", unless(None, False)),
    "prompt": ("a stored prompt", ALWAYS),
    "include": (
        "adding such facts to the answer",
        lambda given: isinstance(given, list) and any(name not in _NOTHING_TO_ADD for name in map(str, given)),
    ),
    "moderation": ("moderation", ALWAYS),
    "logprobs": ("log probabilities", unless(None, False)),
    "top_logprobs": ("log probabilities", unless(None, 0)),
    "n": ("more than one answer", unless(None, 1)),
    "messages": ("this name of input", ALWAYS),
    "max_tokens": ("this name of max_output_tokens", ALWAYS),
    "max_completion_tokens": ("this name of max_output_tokens", ALWAYS),
    "response_format": ("this name of text.format", unless(None, {"type": "text"})),
    "reasoning.mode": ("another mode of reasoning", unless(None, "standard")),
    "reasoning.context": ("choosing what reasoning is shown", unless(None, "auto")),
}

_ROLES = ("user", "assistant", "system", "developer")


def check_parts(given: ResponsesBody) -> None:
    """Raises RequestFailed(INVALID) for an input with too many parts."""
    if not isinstance(given.input, str):
        item_limits.check_parts(given.input, "input")


async def load_parts(server: ServerState, given: ResponsesBody) -> None:
    """Replaces the files in the input by texts, and loads its images. Raises RequestFailed."""
    if not isinstance(given.input, str):
        await documents.load(server.url_fetcher, given.input, "input", _input_file)
        await images.load(server, given.input, "input", images.openai_part)
        await videos.load(server, given.input, "input")
        await sounds.load(server, given.input, "input")


def _input_file(part: Mapping[str, Any], path: str) -> Document | None:
    return documents.file_fields(part, path) if part.get("type") == "input_file" else None


def messages(given: ResponsesBody, seal: Seal) -> list[TextGenerationRequestMessage]:
    """Messages of the input. Raises RequestFailed for the first item that cannot be read."""
    before = [] if given.instructions is None else [{"role": "system", "content": given.instructions}]
    if isinstance(given.input, str):
        return chat_messages([*before, {"role": "user", "content": given.input}])
    turns: list[dict[str, Any]] = before
    thoughts: list[str] = []
    answered = last_answer(given.input)
    for i, item in enumerate(given.input):
        path = f"input[{i}]"
        if item.get("type") == "reasoning":
            thoughts.append(_thought(item, path, seal))
            continue
        for turn in _turns(item, path, i < answered):
            if turn["role"] == "assistant":
                if any(thoughts):
                    turn["reasoning_content"] = "".join(thoughts)
                thoughts = []
                if "tool_calls" in turn and turns and turns[-1]["role"] == "assistant":
                    # A message and the calls that followed it were one answer.
                    turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
                    continue
            turns.append(turn)
    if not turns:
        raise invalid("input has nothing that this model can read: send a message", "input")
    return chat_messages(turns)


def _turns(item: Mapping[str, Any], path: str, answered: bool) -> list[dict[str, Any]]:
    found = turns_of(item, path)
    if found is not None:
        return found
    kind = item.get("type")
    if kind == "item_reference":
        raise unsupported(f"{path}.type", "a reference to a kept item (send the item itself; say store: false)")
    if kind not in (None, "message"):
        raise unsupported(f"{path}.type", f"an item of type {kind!r:.100}")
    role = item.get("role")
    given = item.get("content")
    if role not in _ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(_ROLES)}, got {role!r:.100}", f"{path}.role")
    if given is None:
        raise invalid(f"{path}.content is missing", f"{path}.content")
    return [{"role": role, "content": content(given, f"{path}.content", answered or role == "assistant")}]


def _thought(item: Mapping[str, Any], path: str, seal: Seal) -> str:
    """The text of a reasoning item, in clear or sealed by this server; a summary alone gives no text."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise invalid(f"{path}.content must be a list of parts", f"{path}.content")
    encrypted = item.get("encrypted_content")
    if parts or not isinstance(encrypted, str):
        return "".join(str(part.get("text", "")) for part in parts)
    opened = seal.opened(encrypted)
    if opened is None:
        report("encrypted reasoning", "reasoning that another server has encrypted is left out of a request")
    return opened or ""
