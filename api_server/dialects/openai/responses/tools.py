"""The tools of the Responses API as functions that any model can call, and calls of them as clients know them.

A namespace is a group of functions, a custom tool is a function of one text, and OpenAI's own tools that clients run
(a shell, patches) are functions whose schemas no client sends. Tools that OpenAI's servers run are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from api_server.chat.tools import is_run_by_servers, listed
from api_server.errors import invalid, unsupported
from interfaces import ParsedToolCall

Kind = Literal["function", "custom", "shell", "local_shell", "apply_patch"]

_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_NUMBER = {"type": "integer"}


def _object(required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "local_shell": (
        "Runs a command on the user's machine.",
        _object(["command"], command=_TEXTS, working_directory=_TEXT, timeout_ms=_NUMBER),
    ),
    "shell": (
        "Runs shell commands, one after the other.",
        _object(["commands"], commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
    ),
    "apply_patch": (
        "Creates, changes or deletes one file; diff has the lines with a leading space, + or -.",
        _object(
            ["type", "path"],
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    ),
}
# Longest grammar, in characters, that is shown to the model when it cannot be enforced.
_LONGEST_GRAMMAR = 4000


@dataclass(frozen=True)
class Tool:
    """One tool of a client."""

    kind: Kind
    name: str
    namespace: str | None = None

    @property
    def shown_name(self) -> str:
        """The name under which the model calls it."""
        if self.namespace is None:
            return self.name
        return f"{self.namespace}{self.name if self.namespace.endswith('__') else f'__{self.name}'}"


@dataclass
class Toolbox:
    """The tools of one request: as functions, and by the names under which the model calls them."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    by_name: dict[str, Tool] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None) -> Toolbox:
        """Reads the tools of a request. Raises RequestFailed."""
        found = cls()
        found.functions = listed(tools or (), found._functions)
        return found

    def choice(self, given: Any) -> Any:
        """`tool_choice` in the form of chats. Raises RequestFailed."""
        if not isinstance(given, Mapping):
            return given
        kind = given.get("type")
        if not isinstance(kind, str | None):
            return given  # refused where forms of chats are read
        if kind == "allowed_tools" and isinstance(given.get("tools"), list):
            # A server's own tools may be in the list; they are not offered here, and cannot be allowed.
            named = [self.choice(tool) for tool in given["tools"] if not _is_elsewhere(tool)]
            return {**given, "tools": named}
        if kind == "custom" or kind in _OWN or given.get("namespace") is not None:
            tool = Tool("function", str(given.get("name", kind)), _optional_text(given, "namespace", "tool_choice"))
            return {"type": "function", "name": tool.shown_name}
        if _is_elsewhere(given):
            raise unsupported("tool_choice", f"a tool of type {kind!r:.100}, which servers run themselves,")
        return given

    def item(self, call: ParsedToolCall, begun: bool) -> dict[str, Any]:
        """A call in its client's form, without id and status; one that has only begun has no arguments yet."""
        tool = self.by_name.get(call.name) or Tool("function", call.name)
        common: dict[str, Any] = {"type": item_type(tool.kind), "call_id": call.id}
        if tool.kind in ("function", "custom"):
            common["name"] = tool.name
            if tool.namespace is not None:
                common["namespace"] = tool.namespace
        arguments = "" if begun else call.arguments
        match tool.kind:
            case "function":
                return common | {"arguments": arguments}
            case "custom":
                return common | {"input": text_of(arguments)}
        found = _object_of(arguments)
        if tool.kind == "apply_patch":
            return common | {"operation": {"type": "update_file", "path": "", **found}}
        if tool.kind == "shell":
            return common | {"action": {"commands": [], "timeout_ms": None, "max_output_length": None, **found}}
        return common | {"action": {"type": "exec", "command": [], "env": {}, **found}}

    def kind_of(self, name: str) -> Kind:
        tool = self.by_name.get(name)
        return "function" if tool is None else tool.kind

    def _functions(
        self, tool: Mapping[str, Any], path: str, namespace: str | None = None
    ) -> list[dict[str, Any]] | None:
        kind = tool.get("type", "function")
        if kind == "namespace" and namespace is None:
            return self._in_namespace(tool, path)
        if is_run_by_servers(kind) or _is_hosted_shell(tool):
            return None
        if kind == "function":
            own = tool.get("function")
            function = dict(own) if isinstance(own, Mapping) else {k: v for k, v in tool.items() if k != "type"}
            return [self._shown(Tool("function", _name(function, path), namespace), function)]
        if kind == "custom":
            return [self._shown(Tool("custom", _name(tool, path), namespace), _custom(tool, path))]
        if kind in tuple(_OWN):  # it may be anything, and not all can be hashed
            description, schema = _OWN[kind]
            return [self._shown(Tool(kind, kind), {"description": description, "parameters": schema})]
        raise unsupported(f"{path}.type", f"a tool of type {kind!r:.100}")

    def _in_namespace(self, tool: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
        namespace = _name(tool, path)
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(each, Mapping) for each in inner):
            raise invalid(f"{path}.tools must be a list of tools", f"{path}.tools")
        found = [self._functions(each, f"{path}.tools[{i}]", namespace) for i, each in enumerate(inner)]
        return [function for functions in found for function in functions or ()]

    def _shown(self, tool: Tool, function: Mapping[str, Any]) -> dict[str, Any]:
        self.by_name[tool.shown_name] = tool
        return {"type": "function", "function": {**function, "name": tool.shown_name}}


def item_type(kind: Kind) -> str:
    return {"custom": "custom_tool_call"}.get(kind, f"{kind}_call")


def input_of(text: Any) -> str:
    """The arguments of a custom tool's call."""
    return orjson.dumps({"input": text}).decode()


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')


def text_of(arguments: str) -> str:
    """The text of a custom tool's call; of a call that was cut off, the part that is there."""
    opening = _OPENING.match(arguments)
    if opening is None:
        found = _object_of(arguments).get("input", arguments)
        return found if isinstance(found, str) else arguments
    try:
        text, _ = json.decoder.scanstring(arguments, opening.end(), False)  # type: ignore[attr-defined]
    except ValueError:
        return _cut_off(arguments[opening.end() :])
    return str(text)


def _cut_off(escaped: str) -> str:
    """Decodes the beginning of a JSON text whose end is missing, perhaps within an escape."""
    for shorter in range(min(len(escaped), 12) + 1):
        try:
            return str(json.loads(f'"{escaped[: len(escaped) - shorter]}"', strict=False))
        except ValueError:
            continue
    return ""


def _object_of(arguments: str) -> dict[str, Any]:
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _custom(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A custom tool as a function of one text; a pattern is enforced, a grammar of another kind is shown."""
    text = dict(_TEXT)
    strict = False
    form = tool.get("format")
    kind = form.get("type") if isinstance(form, Mapping) else None
    if isinstance(form, Mapping) and kind == "grammar":
        definition = form.get("definition")
        syntax = form.get("syntax")
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            raise invalid(f"{path}.format must have syntax (lark or regex) and definition", f"{path}.format")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
            strict = True
        else:
            text["description"] = f"A text of this grammar (Lark):\n{definition[:_LONGEST_GRAMMAR]}"
    elif kind not in (None, "text"):
        raise invalid(f"{path}.format.type must be text or grammar, got {kind!r:.100}", f"{path}.format.type")
    described = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    return {**described, "parameters": _object(["input"], input=text), "strict": strict}


def _is_hosted_shell(tool: Mapping[str, Any]) -> bool:
    environment = tool.get("environment")
    where = environment.get("type") if isinstance(environment, Mapping) else None
    return tool.get("type") == "shell" and where not in (None, "local")


def _is_elsewhere(tool: Any) -> bool:
    return isinstance(tool, Mapping) and is_run_by_servers(tool.get("type"))


def _name(given: Mapping[str, Any], path: str) -> str:
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{path}.name must be a name, got {name!r:.100}", f"{path}.name")
    return name


def _optional_text(given: Mapping[str, Any], key: str, path: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{path}.{key} must be a text, got {value!r:.100}", f"{path}.{key}")
    return value
