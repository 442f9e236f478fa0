"""The formats of the served model's reasoning and tool calls, from the settings or the chat template.

Makes the reader of each answer. Knows settings and the tokenizer; the formats themselves are in `parsers/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.answers.reader import AnswerReader
from api_server.parsers import detection
from api_server.parsers.answer import AnswerParser
from api_server.parsers.call_grammar import CallGrammar, strict_tags
from api_server.parsers.reasoning import LONGEST_TURN, MarkedReasoning
from api_server.parsers.registry import TOOL_FORMATS, ReasoningFormat, ToolFormat, reasoning_format, tool_format
from api_server.text.tokenizer import Tokenizer
from interfaces import Constraint, ConstraintKind, TextGenerationRequest
from shared.settings import Settings

Tokens = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class AnswerFormats:
    """The answer formats. None: the model has no such format, or the operator wants it left in the text."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    tokenizer: Tokenizer

    @classmethod
    def of(cls, settings: Settings, tokenizer: Tokenizer) -> AnswerFormats:
        """Chooses the formats. ValueError names the setting whose format is unknown."""
        template = tokenizer.chat_template
        tools = settings.tool_parser
        reasoning = settings.reasoning_parser
        return cls(
            detection.tools_of(template) if tools == "auto" else None if tools == "none" else tool_format(tools),
            detection.reasoning_of(template)
            if reasoning == "auto"
            else None
            if reasoning == "none"
            else reasoning_format(reasoning),
            tokenizer,
        )

    def tools_for(self, request: TextGenerationRequest) -> ToolFormat | None:
        """The tool format for a request. A model without one writes forced calls as JSON."""
        if not request.tools:
            return None
        return TOOL_FORMATS["json"] if self.tools is None and request.forced_tools else self.tools

    def kept(self, request: TextGenerationRequest) -> frozenset[int]:
        """Special tokens that the reader of this answer needs, and that stay in its text."""
        marks = [mark for each in (self.tools_for(request),) if each is not None for mark in each.marks]
        if self.reasoning is not None:
            marks += self.reasoning.marks
        ids = (self.tokenizer.token_of(mark) for mark in marks if request.parse_answer)
        return frozenset(token for token in ids if token is not None)

    def thinks(self, request: TextGenerationRequest, prompt: Tokens) -> bool:
        """True when the answers to this prompt begin within reasoning and their readers need to know."""
        return _is_read(request) and self.opens(prompt)

    def reader(self, request: TextGenerationRequest, thinking: bool) -> AnswerReader | None:
        """A reader for the answer, or None when the answer stays as the model writes it."""
        if not _is_read(request):
            return None
        finder = self._finder()
        tools = self.tools_for(request) if request.parse_answer else None
        separate = request.separate_reasoning and request.parse_answer
        forced = request.forced_tools is not None
        parser = AnswerParser(tools, self.reasoning if separate else None, schemas_of(request), thinking, forced)
        return AnswerReader(parser, finder, thinking, request)

    def opens(self, prompt: Tokens) -> bool:
        """True when the answer begins within reasoning."""
        finder = self._finder()
        if finder is None or self.reasoning is None:
            return False
        return self.reasoning.inside or finder.will_reason_after_prompt(list(map(int, prompt[-LONGEST_TURN:])))

    def opened(self, request: TextGenerationRequest) -> TextGenerationRequest:
        """The request with its reasoning opened, if it asks for reasoning and for a form that begins after it.

        Otherwise the model might leave reasoning out, and the form would never begin; or, with strict tools, the text
        around their calls would have no place for the mark that begins reasoning.
        """
        options = request.chat_template_options or {}
        wanted = options.get("enable_thinking") is True or options.get("thinking") is True
        formed = request.constraint is not None or request.forced_tools is not None or bool(_strict_tools(request))
        if self.reasoning is None or not (request.messages and wanted and formed) or request.continue_final_message:
            return request
        return replace(request, opening=self.reasoning.opening)

    def constrained(
        self, request: TextGenerationRequest, prompt: Tokens, schemas: Mapping[str, Any] | None = None
    ) -> TextGenerationRequest:
        """The request with the grammar of its calls, if they are forced, strict, or possible beside a document.

        `schemas` are those that calls are held to, by the names of their tools; None: as the tools have them.

        A form begins after the reasoning that the prompt has opened.
        """
        opened = bool(request.messages) and self.opens(prompt)
        made = self._form(request, opened, schemas_of(request) if schemas is None else schemas)
        if made is None:
            return request
        if opened and self.reasoning is not None and not made.begins_after:
            made = replace(made, begins_after=self.reasoning.markers.ends[0])
        return replace(request, constraint=made)

    def _form(self, request: TextGenerationRequest, opened: bool, schemas: Mapping[str, Any]) -> Constraint | None:
        given = request.constraint
        tools = self.tools_for(request)
        if tools is None:
            return given
        grammar = CallGrammar(tools, self.tokenizer.token_of, after_thought=opened)
        thinks = self.reasoning if not opened and _may_think(request) else None
        if request.forced_tools is not None:
            forced = {name: schemas[name] for name in request.forced_tools}
            source = grammar.source(forced, request.most_calls, thinks)
            return Constraint(ConstraintKind.LARK, source, field="tools")
        if given is not None:
            if given.kind is not ConstraintKind.JSON_SCHEMA:
                return given
            source = grammar.source(schemas, request.most_calls, thinks, given.source)
            return Constraint(ConstraintKind.LARK, source, given.begins_after, given.field)
        strict = _strict_tools(request)
        tags = strict_tags(tools, {**schemas_of(request), **schemas}, strict) if strict else None
        return None if tags is None else Constraint(ConstraintKind.STRUCTURAL_TAG, tags, field="tools")

    @property
    def closing(self) -> list[int]:
        """The tokens that end reasoning when its budget is reached."""
        return [] if self.reasoning is None else self.tokenizer.ids_of(self.reasoning.closing)

    def _finder(self) -> MarkedReasoning | None:
        if self.reasoning is None:
            return None
        return self.reasoning.finder(self.tokenizer.piece, self.tokenizer.added)


def _is_read(request: TextGenerationRequest) -> bool:
    """True when an answer is parsed, or its reasoning counted."""
    return request.parse_answer or request.max_thinking_tokens is not None


def _may_think(request: TextGenerationRequest) -> bool:
    options = request.chat_template_options or {}
    return options.get("enable_thinking") is not False and options.get("thinking") is not False


def _strict_tools(request: TextGenerationRequest) -> frozenset[str]:
    functions = (tool["function"] for tool in request.tools or ())
    return frozenset(each["name"] for each in functions if each.get("strict") is True)


def schemas_of(request: TextGenerationRequest) -> dict[str, Any]:
    """The schemas of the parameters of the request's tools, by name."""
    functions = [tool.get("function") for tool in request.tools or ()]
    return {each["name"]: each.get("parameters") or {} for each in functions if isinstance(each, Mapping)}
