"""The regions where a grammar applies: not while the model thinks, and with optional tools only between their
delimiters.

A region is recognised by its delimiters, which may be several tokens long. Knows tokens; knows no grammar and no
matcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class GrammarEnforcementSnapshot:
    """The part of the state that a walk over speculative tokens changes, to be restored when they are undone."""

    in_thinking_region: bool
    grammar_enforced: bool
    tool_calling_match_buffer: list[int]
    thinking_match_buffer: list[int]


@dataclass(slots=True)
class GrammarState:
    """State machine of one request; `update` gets every generated token but EOS.

    `tools_forced`: the grammar is that of a tool call from the first token on. A match buffer holds the last tokens
    that may begin the delimiter that is waited for.
    """

    grammar_enforced: bool = False
    tools_forced: bool = False
    requires_structured_output_flag: bool = False
    in_thinking_region: bool = False
    thinking_start: list[int] = field(default_factory=list)
    thinking_end: list[int] = field(default_factory=list)
    tool_start: list[int] = field(default_factory=list)
    tool_end: list[int] = field(default_factory=list)
    thinking_match_buffer: list[int] = field(default_factory=list)
    tool_calling_match_buffer: list[int] = field(default_factory=list)

    @property
    def waits_for_region(self) -> bool:
        """Whether enforcement is off only until a delimiter comes."""
        return self.in_thinking_region or (bool(self.tool_start) and not self.tools_forced)

    def set_tool_region(self, start: Sequence[int] | None, end: Sequence[int] | None) -> None:
        if start is None and end is None:
            return
        self.tool_start = list(start or ())
        self.tool_end = list(end or ())
        self.tool_calling_match_buffer = []

    def set_thinking_region(self, start: Sequence[int] | None, end: Sequence[int] | None) -> None:
        """Start a thinking region that lasts to `end`; another starts whenever `start` comes before anything is
        enforced."""
        if not end:
            return
        self.thinking_start = list(start or ())
        self.thinking_end = list(end)
        self.thinking_match_buffer = []
        self.in_thinking_region = True

    def update(self, token: int, has_grammar: bool) -> bool:
        """Advance by a generated token. True if the grammar's matcher must consume it."""
        if self.in_thinking_region:
            if _completes(self.thinking_match_buffer, self.thinking_end, token):
                self.in_thinking_region = False
                self.grammar_enforced |= self.tools_forced or has_grammar
            return False
        if not self.grammar_enforced and _completes(self.thinking_match_buffer, self.thinking_start, token):
            self.in_thinking_region = True
            return False
        if (self.tool_start or self.tool_end) and not self.tools_forced:
            return self._update_tools(token)
        return self.grammar_enforced

    def _update_tools(self, token: int) -> bool:
        if not self.grammar_enforced:
            self.grammar_enforced = _completes(self.tool_calling_match_buffer, self.tool_start, token)
            return self.grammar_enforced
        if _completes(self.tool_calling_match_buffer, self.tool_end, token):
            self.grammar_enforced = False
        return True

    def snapshot(self) -> GrammarEnforcementSnapshot:
        return GrammarEnforcementSnapshot(
            self.in_thinking_region,
            self.grammar_enforced,
            list(self.tool_calling_match_buffer),
            list(self.thinking_match_buffer),
        )

    def restore(self, snapshot: GrammarEnforcementSnapshot) -> None:
        self.in_thinking_region = snapshot.in_thinking_region
        self.grammar_enforced = snapshot.grammar_enforced
        self.tool_calling_match_buffer = list(snapshot.tool_calling_match_buffer)
        self.thinking_match_buffer = list(snapshot.thinking_match_buffer)


def _completes(buffer: list[int], delimiter: list[int], token: int) -> bool:
    """Slide `buffer` by one token. True, and the buffer empty, when it then holds the whole delimiter."""
    if not delimiter:
        return False
    buffer.append(token)
    del buffer[: -len(delimiter)]
    if buffer != delimiter:
        return False
    buffer.clear()
    return True
