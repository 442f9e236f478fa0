"""Ollama's messages as messages of OpenAI's form, which the common path reads.

Images are bare base64 beside the content, the arguments of calls are objects, and calls have no ids, so that a result
belongs to the first open call of its tool, else to the first open call.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from api_server.chat.images import ImageSource
from api_server.chat.messages import last_answer
from api_server.errors import invalid, unsupported


class _OpenCalls:
    """The calls that have no result yet. All steps take the same time, however many calls there are."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._in_order: deque[str] = deque()
        self._by_name: defaultdict[str, deque[str]] = defaultdict(deque)

    def add(self, identity: str, name: str) -> None:
        self._names[identity] = name
        self._in_order.append(identity)
        self._by_name[name].append(identity)

    def take(self, identity: Any, name: Any) -> tuple[Any, Any]:
        """Finds the call of a result and closes it. Returns its id and name, as far as they are known."""
        found = identity
        if not isinstance(identity, str):
            named = self._by_name.get(name) if isinstance(name, str) else None
            found = self._first(named or deque()) or self._first(self._in_order)
        own = self._names.pop(found or "", None)
        return found, name or own

    def _first(self, identities: deque[str]) -> str | None:
        while identities:
            identity = identities.popleft()
            if identity in self._names:
                return identity
        return None


def turns(given: Sequence[Any], sees: bool) -> list[dict[str, Any]]:
    """The messages in OpenAI's form. Raises RequestFailed that names the message."""
    answered = last_answer(given)
    calls = _OpenCalls()
    found = []
    for i, message in enumerate(given):
        path = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise invalid(f"{path} must be an object with role and content", "messages")
        turn: dict[str, Any] = {"role": message.get("role"), "content": _content(message, path)}
        if message.get("images") and not sees and turn["role"] == "user" and i > answered:
            raise unsupported(f"{path}.images", "an image, which this model cannot see,")
        if message.get("thinking") is not None:
            turn["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            turn["tool_calls"] = _calls(message["tool_calls"], i, calls)
        if turn["role"] == "tool":
            names = ("tool_call_id", "name")
            known = calls.take(message.get("tool_call_id"), message.get("tool_name") or message.get("name"))
            turn |= {name: value for name, value in zip(names, known, strict=True) if isinstance(value, str)}
        found.append(turn)
    return found


def image_part(part: Mapping[str, Any], path: str) -> ImageSource | None:
    """The image of a part that `parts` has made."""
    if part.get("type") != "image":
        return None
    return ImageSource(part["field"], "base64", part["data"])


def parts(text: str, images: Sequence[Any], path: str) -> list[dict[str, Any]]:
    """A text behind its images, as parts of a message. `path` is that of the images."""
    found: list[dict[str, Any]] = []
    for i, data in enumerate(images):
        field = f"{path}[{i}]"
        if not isinstance(data, str):
            raise invalid(f"{field} must be base64, a text", field)
        # Clients of other servers send a data URI, whose head says nothing that the bytes do not say.
        bare = data.partition(",")[2] if data[:5].lower() == "data:" else data
        found.append({"type": "image", "data": bare, "field": field})
    return [*found, {"type": "text", "text": text}] if text else found


def _content(message: Mapping[str, Any], path: str) -> Any:
    content = message.get("content")
    images = message.get("images")
    if content is not None and not isinstance(content, str):
        raise invalid(f"{path}.content must be a text; images are beside it, as base64 in images", f"{path}.content")
    if not images:
        return content or ""
    if not isinstance(images, list):
        raise invalid(f"{path}.images must be a list of images as base64", f"{path}.images")
    return parts(content or "", images, f"{path}.images")


def _calls(given: Any, message: int, calls: _OpenCalls) -> list[dict[str, Any]]:
    """Calls with ids, which many templates want."""
    path = f"messages[{message}].tool_calls"
    if not isinstance(given, list):
        raise invalid(f"{path} must be a list", path)
    found = []
    for i, call in enumerate(given):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(f"{path}[{i}].function must be an object with name and arguments", path)
        known = call.get("id")
        # The strictest template takes nine letters and digits.
        identity = known if isinstance(known, str) and known else f"c{message:05d}{i:03d}"
        arguments = function.get("arguments")
        named = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        found.append({"id": identity, "type": "function", "function": named})
        calls.add(identity, function["name"])
    return found
