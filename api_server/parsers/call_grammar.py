"""The grammar of forced calls, in the form that the model writes and the reader of its format reads.

The language is the dialect of Lark that llguidance has. Marks that are one token are named by their ids, so that
special tokens match, and cannot be spelled out. Knows forms of calls; compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_server.parsers import harmony
from api_server.parsers.calls import schema_of
from api_server.parsers.registry import ReasoningFormat, ToolFormat
from api_server.parsers.sectioned_calls import DEEPSEEK, KIMI

# Text without `</`, the beginning of every mark that ends such a text.
_FREE_TEXT = r"/([^<]|<[^\/])*/"


# Most calls in an answer with a prescribed form, unless the request has a limit.
MOST_CALLS = 16


@dataclass(frozen=True)
class CallForm:
    """The text around calls (`begin`, `separator`, `end`), and around name and arguments of one.

    `separator` None: there is one call. `tagged`: arguments are not a JSON object, but have this form each.
    """

    begin: str
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str | None
    end: str
    tagged: ArgumentForm | None = None


@dataclass(frozen=True)
class ArgumentForm:
    """The form of one tagged argument. `spelled`: texts are written plainly, and not as JSON."""

    before_name: str
    before_value: str
    after_value: str
    separator: str
    spelled: bool


def _objects(begin: str, end: str, around: tuple[str, str], separator: str, arguments: str = "arguments") -> CallForm:
    return CallForm(begin, around[0] + '{"name": "', f'", "{arguments}": ', "}" + around[1], separator, end)


_SECTION, _CALL, _SEP, _CALL_END, _SECTION_END = DEEPSEEK
_KIMI_SECTION, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END, _KIMI_SECTION_END = KIMI

# Call forms by the names of the formats. A NUL stands for the number of a call.
FORMS: Mapping[str, CallForm] = {
    "hermes": _objects("", "", ("<tool_call>\n", "\n</tool_call>"), "\n"),
    "llama3_json": _objects("", "", ("", ""), "; ", "parameters"),
    "granite": _objects("<|tool_call|>[", "]", ("", ""), ", "),
    "mistral_list": _objects("[TOOL_CALLS][", "]", ("", ""), ", "),
    "mistral": CallForm("", "[TOOL_CALLS]", "[ARGS]", "", "", ""),
    "deepseek_v3": CallForm(_SECTION, f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_CALL_END}", "\n", _SECTION_END),
    "deepseek_v31": CallForm(_SECTION, _CALL, _SEP, _CALL_END, "", _SECTION_END),
    "kimi_k2": CallForm(
        _KIMI_SECTION, f"{_KIMI_CALL}functions.", f":\0{_KIMI_ARGUMENTS}", _KIMI_CALL_END, "", _KIMI_SECTION_END
    ),
    "glm45": CallForm(
        "",
        "<tool_call>",
        "\n",
        "</tool_call>",
        "\n",
        "",
        ArgumentForm("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "", True),
    ),
    "qwen3_coder": CallForm(
        "",
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "\n",
        "",
        ArgumentForm("<parameter=", ">\n", "\n</parameter>\n", "", True),
    ),
    "pythonic": CallForm("[", "", "(", ")", ", ", "]", ArgumentForm("", "=", "", ", ", False)),
    "harmony": CallForm(
        "",
        f"{harmony.CHANNEL}commentary to=functions.",
        f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        "",
        None,
        "",
    ),
    "json": _objects("[", "]", ("", ""), ", ", "parameters"),
}


def strict_tags(tools: ToolFormat, schemas: Mapping[str, Any], strict: frozenset[str]) -> str | None:
    """A structural tag: free text, in which calls of the `strict` tools have arguments of their schemas.

    None for a format whose calls do not begin with a mark of their own.
    """
    form = FORMS[tools.name]
    trigger = next((mark for mark in tools.marks if form.before_name.startswith(mark)), None)
    if trigger is None or form.tagged is not None or "\0" in form.before_arguments or tools.name == "harmony":
        return None
    structures = [
        {
            "begin": form.before_name + name + form.before_arguments,
            "schema": schema if name in strict else {"type": "object"},
            "end": form.after_arguments,
        }
        for name, schema in schemas.items()
    ]
    return json.dumps({"type": "structural_tag", "structures": structures, "triggers": [trigger]}, ensure_ascii=False)


class CallGrammar:
    """Writes the grammar for one model.

    `token_of` returns the id of a text that is a token. `after_thought`: the grammar applies from the end of reasoning
    on.
    """

    def __init__(self, tools: ToolFormat, token_of: Callable[[str], int | None], after_thought: bool = False) -> None:
        self._gap = after_thought
        self._form = FORMS[tools.name]
        self._marks = re.compile("|".join(map(re.escape, sorted(tools.marks, key=len, reverse=True))) or r"(?!)")
        self._token_of = token_of
        self._rules: list[str] = []

    def source(
        self, schemas: Mapping[str, Any], most: int | None, thought: ReasoningFormat | None, instead: str | None = None
    ) -> str:
        """Lark grammar of up to `most` calls of the tools with these schemas, after reasoning in the form `thought`.

        `instead` is the text of a JSON schema: an answer of that form is allowed, too.
        """
        form = self._form
        self._rules = []
        names = [self._call(i, name, schema) for i, (name, schema) in enumerate(schemas.items())]
        before = "thought? " if thought else f"TEXT_{self._terminal('GAP', _GAP)} " if self._gap else ""
        more = 0 if form.separator is None else (most or MOST_CALLS) - 1
        repeated = f" ({self._literal(form.separator or '')} call){{0,{more}}}" if more else ""
        rules = [
            f"start: {before}{'answer' if instead else 'calls'}",
            f"calls: {self._literal(form.begin)} call{repeated} {self._literal(form.end)}",
            f"call: {' | '.join(names)}",
        ]
        if instead:
            rules += ["answer: calls | document", f"document: %json {instead}"]
        if thought:
            rules.append(self._thought(thought))
        return "\n".join([*rules, *self._rules]) + "\n"

    def _call(self, number: int, name: str, schema: Any) -> str:
        form = self._form
        rule = f"call_{number}"
        arguments = self._tagged(number, schema, form.tagged) if form.tagged else self._object(number, schema)
        parts = (form.before_name + name + form.before_arguments, arguments, form.after_arguments)
        self._rules.append(f"{rule}: {self._literal(parts[0])} {parts[1]} {self._literal(parts[2])}")
        return rule

    def _object(self, number: int, schema: Any) -> str:
        whole = {"type": "object"} | dict(schema) if isinstance(schema, Mapping) else {"type": "object"}
        return self._rule(f"arguments_{number}", f"%json {json.dumps(whole, ensure_ascii=False)}")

    def _tagged(self, number: int, schema: Any, form: ArgumentForm) -> str:
        """The rule of arguments in the order of the schema; a separator stands between two that are present."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        names = list(properties) if isinstance(properties, Mapping) else []
        listed = schema.get("required") if isinstance(schema, Mapping) else None
        required = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
        separator = self._literal(form.separator)
        first = self._rule(f"first_{number}_{len(names)}", '""')
        later = self._rule(f"later_{number}_{len(names)}", '""')
        for i in range(len(names) - 1, -1, -1):
            own = self._argument(f"{number}_{i}", names[i], _with_definitions(schema, names[i]), form)
            skip_first, skip_later = ("", "") if names[i] in required else (f" | {first}", f" | {later}")
            first = self._rule(f"first_{number}_{i}", f"{own} {later}{skip_first}")
            later = self._rule(f"later_{number}_{i}", f"{separator} {own} {later}{skip_later}")
        return first

    def _argument(self, place: str, name: str, schema: Mapping[str, Any], form: ArgumentForm) -> str:
        before = self._literal(form.before_name + name + form.before_value)
        after = self._literal(form.after_value)
        return self._rule(f"argument_{place}", f"{before} {self._value(place, schema, form)} {after}")

    def _value(self, place: str, schema: Mapping[str, Any], form: ArgumentForm) -> str:
        if not form.spelled or schema.get("type") != "string":
            return self._rule(f"value_{place}", f"%json {json.dumps(schema, ensure_ascii=False)}")
        choices = schema.get("enum")
        if isinstance(choices, Sequence) and choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(map(json.dumps, choices))})"
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", "")
        bounded = isinstance(least, int) and (most == "" or isinstance(most, int)) and (least or most != "")
        return f"TEXT_{self._terminal(place, f'/[^<]{{{least},{most}}}/' if bounded else _FREE_TEXT)}"

    def _thought(self, form: ReasoningFormat) -> str:
        if form.name == "harmony":
            begin = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
            end = f"{harmony.END}{harmony.START}assistant"
        else:
            begin = form.markers.starts[0]
            end = form.markers.ends[0]
        marks = re.compile("|".join(map(re.escape, form.marks)))
        text = f"TEXT_{self._terminal('THOUGHT', _FREE_TEXT)}"
        gap = f"TEXT_{self._terminal('GAP', _GAP)}"
        return f"thought: {self._literal(begin, marks)} {text} {self._literal(end, marks)} {gap}"

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def _terminal(self, name: str, pattern: str) -> str:
        self._rules.append(f"TEXT_{name}: {pattern}")
        return name

    def _literal(self, text: str, marks: re.Pattern[str] | None = None) -> str:
        """A text in Lark: marks that are tokens by their ids, all else in quotes."""
        parts = []
        at = 0
        for found in (marks or self._marks).finditer(text):
            token = self._token_of(found[0])
            if token is not None:
                parts += [*_quoted(text[at : found.start()]), f"<[{token}]>"]
                at = found.end()
        return " ".join([*parts, *_quoted(text[at:])]) or '""'


def _with_definitions(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of one parameter, which may refer to definitions beside it."""
    own = schema_of(schema, name)
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema and "$ref" in json.dumps(own)} | dict(
        own
    )


_GAP = r"/[ \n]{0,4}/"


def _quoted(text: str) -> list[str]:
    before, number, after = text.partition("\0")
    return [
        *([json.dumps(before)] if before else []),
        *(["/[0-9]{1,3}/"] if number else []),
        *([json.dumps(after)] if after else []),
    ]
