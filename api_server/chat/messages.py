"""Turns the messages of a body into typed messages. Errors name the path of what is wrong.

Knows OpenAI's message format. It does not know templates or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import ValidationError

from api_server.chat.media_parts import LOADED
from api_server.chat.spoken import transcript_of
from api_server.errors import ErrorKind, RequestFailed, invalid, unsupported
from interfaces import MessageContent, TextContentPart, TextGenerationRequestMessage

TEXT_KINDS = {"text": "text", "refusal": "refusal"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


_MEDIA = {
    "image": "an image",
    "image_url": "an image",
    "input_image": "an image",
    "computer_screenshot": "a screenshot",
    "audio": "a sound",
    "input_audio": "a sound",
    "audio_url": "a sound",
    "video": "a video",
    "video_url": "a video",
    "input_video": "a video",
}


def chat_messages(given: Sequence[Any]) -> list[TextGenerationRequestMessage]:
    """Types the messages. Raises RequestFailed(INVALID or UNSUPPORTED) for the first message that is wrong."""
    modern = _modern(given)
    answered = last_answer(modern)
    return [_message(message, f"messages[{i}]", i < answered) for i, message in enumerate(modern)]


def last_answer(messages: Sequence[Any]) -> int:
    """Index of the model's last message, or -1: messages before it have been answered."""
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    return max((i for i, role in enumerate(roles) if role == "assistant"), default=-1)


def _modern(given: Sequence[Any]) -> list[Any]:
    """Rewrites `function_call` and its result, the old form of one call, in today's form."""
    found: list[Any] = []
    last_id = None
    for i, message in enumerate(given):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "assistant" and isinstance(message.get("function_call"), Mapping) and not message.get("tool_calls"):
            last_id = f"call_{i}"
            rest = {name: value for name, value in message.items() if name != "function_call"}
            message = rest | {"tool_calls": [{"id": last_id, "function": message["function_call"]}]}
        elif role == "function" and last_id is not None:
            message = {**message, "role": "tool", "tool_call_id": last_id}
        found.append(message)
    return found


def _message(given: Any, path: str, answered: bool) -> TextGenerationRequestMessage:
    if not isinstance(given, Mapping):
        raise invalid(f"{path} must be an object with role and content", "messages")
    role = given.get("role")
    if role not in ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(ROLES)}, got {role!r:.100}", f"{path}.role")
    if given.get("audio") is not None:
        given = _with_transcript(given, path)
    seen = role == "user" and not answered
    fields = dict(given) | {"content": text_content(given.get("content"), f"{path}.content", unseen=not seen)}
    if "reasoning" in fields:
        # Two names of one field: answers have both, and templates know the longer one.
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


def _with_transcript(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A message of the model that names a spoken answer, with that answer's text. Raises RequestFailed."""
    if given["role"] != "assistant":
        raise unsupported(f"{path}.audio", "sound of others than the assistant")
    rest = {name: value for name, value in given.items() if name != "audio"}
    return rest | {"content": given.get("content") or transcript_of(given["audio"], f"{path}.audio")}


def text_content(
    content: Any, path: str, kinds: Mapping[str, str] = TEXT_KINDS, unseen: bool = False
) -> str | list[MessageContent]:
    """A message's content. `kinds` are the types of parts that are texts, each with the key of its text.

    Media that have been loaded stay. `unseen`: an image that has not, or the like, becomes a text that says
    so. A part that the user asks about now is refused instead; a tool's result, or an old message, must not end a
    conversation.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{path} must be a text or a list of parts", path)
    return [_part(part, f"{path}[{i}]", kinds, unseen) for i, part in enumerate(content)]


def _part(part: Any, path: str, kinds: Mapping[str, str], unseen: bool) -> MessageContent:
    return part if isinstance(part, LOADED) else TextContentPart(text=_part_text(part, path, kinds, unseen))


def _part_text(part: Any, path: str, kinds: Mapping[str, str], unseen: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = kinds.get(kind) if isinstance(kind, str) else None
    if key is not None:
        if not isinstance(part.get(key), str):
            raise invalid(f"{path}.{key} must be a text", f"{path}.{key}")
        return str(part[key])
    if unseen and kind in _MEDIA:
        return f"[Here was {_MEDIA[kind]}. You cannot see it: you read text only.]"
    raise RequestFailed(
        ErrorKind.UNSUPPORTED, f"{path}: content of type {kind!r} is not supported by this model, only text", field=path
    )


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """A call whose arguments, if they are a JSON object, are given as one: templates of tool models want that."""
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
