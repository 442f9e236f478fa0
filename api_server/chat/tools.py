"""The tools of a body and the choice among them, in the forms that clients of OpenAI, TGI and vLLM send.

Knows their forms and what must fit together; knows neither templates nor how a model writes calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_server.body.item_limits import MOST_TOOLS, check_count
from api_server.body.unknown_fields import report
from api_server.errors import RequestFailed, invalid, shown, unsupported
from api_server.parsers.calls import is_name

# Returns the functions of one tool at a path; None when a server would run the tool. Raises RequestFailed.
Reader = Callable[[Mapping[str, Any], str], list[dict[str, Any]] | None]


def listed(tools: Sequence[Any], read: Reader) -> list[dict[str, Any]]:
    """All tools as functions. Tools that servers run themselves are skipped beside functions, and refused alone."""
    found: list[dict[str, Any]] = []
    left_out: list[tuple[str, Any]] = []
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise invalid(f"{path} must be an object, got {tool!r:.100}", "tools")
        functions = read(tool, path)
        found += functions or ()
        if functions is None:
            left_out.append((f"{path}.type", tool.get("type")))
    check_count(len(found), "functions", "tools", MOST_TOOLS)
    for path, kind in left_out:
        if not found:
            raise unsupported(path, f"a tool of type {kind!r:.100}, which servers run themselves,")
        report(f"tool {kind}", "a tool of type %.100r, which servers run themselves, is left out of a request", kind)
    return found


@dataclass(frozen=True)
class ToolUse:
    """Tools to show to the model; the answer must call at least one of the `forced` ones."""

    tools: list[dict[str, Any]] | None = None
    forced: list[str] | None = None


def tool_use(tools: Sequence[Any] | None, choice: Any) -> ToolUse:
    """Reads tools and choice. Raises RequestFailed.

    A tool may have its function's fields in `function` or, as in the Responses API, beside it.
    """
    functions = listed(tools or (), _function)
    names = [tool["function"]["name"] for tool in functions]
    known: dict[str, None] = {}
    for i, name in enumerate(names):
        if name in known:
            raise invalid(f"tools[{i}].function.name is {name!r} again: each tool needs a name of its own", "tools")
        known[name] = None
    mode, chosen = _choice(choice, known)
    if mode == "none":
        return ToolUse()
    if mode == "required" and not functions:
        raise invalid("tool_choice needs tools: give the tools of which one must be called", "tool_choice")
    # With one tool named the others are still shown: the prompt stays equal, and cached.
    hidden = set(names).difference(chosen or names) if _is_selection(choice) else ()
    shown = [tool for tool in functions if tool["function"]["name"] not in hidden]
    return ToolUse(shown or None, (chosen or names) if mode == "required" else None)


# A mode is a text, or, for some clients, `{"type": "auto"}`.
_MODES = ("none", "auto", "required")


def _is_selection(choice: Any) -> bool:
    return isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"


# OpenAI's types of tools that no client runs; versions have a date behind the name.
RUN_BY_SERVERS = frozenset(
    {
        "web_search",
        "web_search_preview",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "tool_search",
        "programmatic_tool_calling",
    }
)


def is_run_by_servers(kind: Any) -> bool:
    return isinstance(kind, str) and _VERSION.sub("", kind) in RUN_BY_SERVERS


_VERSION = re.compile(r"_\d{4}_\d{2}_\d{2}$")


def _function(given: Mapping[str, Any], path: str) -> list[dict[str, Any]] | None:
    kind = given.get("type", "function")
    if is_run_by_servers(kind):
        return None
    if kind != "function":
        raise unsupported(f"{path}.type", f"a tool of type {kind!r:.100}: send a function")
    return [_tool(given, path)]


def _tool(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    own = given.get("function")
    function = dict(own) if isinstance(own, Mapping) else {k: v for k, v in given.items() if k != "type"}
    name = function.get("name")
    if not isinstance(name, str) or not is_name(name):
        raise invalid(
            f"{path}.function.name must be a name of letters, digits, '_', '-' and '.', got {name!r}", "tools"
        )
    if "parameters" not in function and isinstance(function.get("arguments"), Mapping):
        function["parameters"] = function.pop("arguments")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{path}.function.parameters must be a JSON schema, an object, got {shown(parameters)}", "tools")
    extra = {k: v for k, v in given.items() if k not in ("type", "function")} if isinstance(own, Mapping) else {}
    return {"type": "function", "function": function, **extra}


def _choice(given: Any, names: Collection[str]) -> tuple[str, list[str] | None]:
    """Returns `none`, `auto` or `required`, and the tools that the choice names; None: all."""
    if given is None:
        return "auto", None
    if isinstance(given, str):
        return (given, None) if given in _MODES else ("required", [_known(given, names)])
    if not isinstance(given, Mapping):
        raise _wrong_choice(given)
    if _is_selection(given):
        inner = given.get("allowed_tools")
        allowed = inner if isinstance(inner, Mapping) else given
        mode = allowed.get("mode", "auto")
        tools = allowed.get("tools")
        if mode not in _MODES or not isinstance(tools, list) or not tools:
            raise _wrong_choice(given)
        return mode, [_known(_named(tool), names) for tool in tools]
    if given.get("type") in _MODES and _named(given) is None:
        return given["type"], None
    name = _named(given)
    if not isinstance(name, str):
        raise _wrong_choice(given)
    return "required", [_known(name, names)]


def _named(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    function = given.get("function")
    return (function if isinstance(function, Mapping) else given).get("name")


def _known(name: Any, names: Collection[str]) -> str:
    if not isinstance(name, str):
        raise _wrong_choice(name)
    if name not in names:
        listed = ", ".join(names) or "none"
        raise invalid(f"tool_choice names {name!r}, which is not among the tools (they are: {listed})", "tool_choice")
    return name


def _wrong_choice(given: Any) -> RequestFailed:
    return invalid(
        "tool_choice must be none, auto, required, or name a function as "
        f'{{"type": "function", "function": {{"name": ...}}}}, got {shown(given)}',
        "tool_choice",
    )
