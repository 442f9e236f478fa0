"""From the messages of a body to typed messages, or an error that names the path of what is wrong.

Knows OpenAI's message format. It does not know templates or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import ValidationError

from api_server.errors import ErrorKind, RequestFailed, invalid
from interfaces.chat import MessageContent, TextContentPart, TextGenerationRequestMessage

TEXT_KINDS = {"text": "text", "refusal": "refusal"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def chat_messages(given: Sequence[Any]) -> list[TextGenerationRequestMessage]:
    """Raises RequestFailed(INVALID or UNSUPPORTED) for the first message that is wrong."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(given: Any, path: str) -> TextGenerationRequestMessage:
    if not isinstance(given, Mapping):
        raise invalid(f"{path} must be an object with role and content", "messages")
    role = given.get("role")
    if role not in ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(ROLES)}, got {role!r:.100}", f"{path}.role")
    fields = dict(given) | {"content": text_content(given.get("content"), f"{path}.content")}
    if "reasoning" in fields:
        # Two names for one thing: answers have both, and templates know the longer one.
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise invalid(f"{path}.tool_calls must be a list", f"{path}.tool_calls")
        fields["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif given.get("content") is None and role != "assistant":
        raise invalid(f"{path}.content is missing", f"{path}.content")
    try:
        return TextGenerationRequestMessage.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = f"{path}.{first['loc'][0]}"
        raise invalid(f"{field}: {first['msg']}", field) from None


def text_content(content: Any, path: str, kinds: Mapping[str, str] = TEXT_KINDS) -> str | list[MessageContent]:
    """A message's content. `kinds` are the types of parts that are texts, each with the key of its text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{path} must be a text or a list of parts", path)
    return [TextContentPart(text=_part_text(part, f"{path}[{i}]", kinds)) for i, part in enumerate(content)]


def _part_text(part: Any, path: str, kinds: Mapping[str, str]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = kinds.get(kind) if isinstance(kind, str) else None
    if key is not None:
        if not isinstance(part.get(key), str):
            raise invalid(f"{path}.{key} must be a text", f"{path}.{key}")
        return str(part[key])
    raise RequestFailed(
        ErrorKind.UNSUPPORTED, f"{path}: content of type {kind!r} is not supported by this model, only text", field=path
    )


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """A call with its arguments as an object, as templates of tool models want them, if they are one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{path}.function must be an object with name and arguments", path)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
