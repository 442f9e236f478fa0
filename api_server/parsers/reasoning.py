"""Reasoning that stands between two markers at the beginning of an answer.

`marked` reads it from text; `MarkedReasoning` finds it in token ids, to count it and to see whether a prompt has
opened it. Knows the forms of markers; knows no tool call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from api_server.parsers.calls import Calls
from api_server.parsers.scanner import Reading, Scanner, Thought, match, passage, space
from interfaces import ParsedReasoningDelta, ReasoningParser, ReasoningSpan


@dataclass(frozen=True)
class Markers:
    """Markers that open and close reasoning; `dropped` are marks around the answer itself."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    dropped: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.dropped)


THINK = Markers(("<think>",), ("</think>",))
KIMI = Markers(("◁think▷", "<think>"), ("◁/think▷", "</think>"))
MISTRAL = Markers(("[THINK]", "<think>"), ("[/THINK]", "</think>"))
GRANITE = Markers(
    ("Here is my thought process:", "Here's my thought process:", "<think>"),
    ("Here is my response:", "Here's my response:", "</think>"),
    ("<response>", "</response>"),
)


def marked(scanner: Scanner, calls: Calls, markers: Markers, inside: bool) -> Reading[None]:
    """Reads reasoning without the white space around it. `inside`: the prompt has opened it already."""
    before = yield from space(scanner)
    found = yield from match(scanner, *markers.starts)
    if found is not None or inside:
        yield from space(scanner)
        if (yield from passage(scanner, markers.ends, Thought, trim=True)) is None:
            return
        yield from space(scanner)
    elif before:
        yield calls.content(before)
    if markers.dropped:
        yield from _without(scanner, calls, markers.dropped)


def _without(scanner: Scanner, calls: Calls, dropped: Sequence[str]) -> Reading[None]:
    while (yield from passage(scanner, dropped, calls.content)):
        pass


class MarkedReasoning(ReasoningParser):
    """Finds markers in the text of tokens, so that a marker may be one token, several, or part of one.

    `piece` is a token's text; `added` are the ids of tokens that no text is cut into, with which templates separate
    turns.
    """

    markers: ClassVar[Markers]
    # True when reasoning may begin anywhere; otherwise it begins only where the answer begins.
    repeats: ClassVar[bool] = False

    def __init__(self, piece: Callable[[int], str], added: Collection[int] = ()) -> None:
        self._piece = piece
        self._added = added
        self._longest = max(map(len, (*self.markers.starts, *self.markers.ends)))
        self._tail = ""
        # True once something other than reasoning has been written.
        self.has_passed = False

    @classmethod
    async def from_tokenizer(cls, tokenizer: Any) -> Self:
        return cls(tokenizer.piece, tokenizer.added)

    @classmethod
    async def reasoning_end_token_id(cls, tokenizer: Any) -> int | None:
        ids = [span.id for span in await tokenizer.spans(cls.markers.ends[0], add_special_tokens=False)]
        return ids[0] if len(ids) == 1 else None

    def stream(self, delta_token_ids: Sequence[int], is_currently_reasoning: bool = True) -> ParsedReasoningDelta:
        """Finds reasoning in new tokens. A marker counts where its last token stands.

        The span is that of the first reasoning in the delta.
        """
        count = len(delta_token_ids)
        outer = inner = 0 if is_currently_reasoning else count
        for at, token in enumerate(delta_token_ids):
            if is_currently_reasoning:
                if self._completes(token, self.markers.ends):
                    return ParsedReasoningDelta(ReasoningSpan((outer, at + 1), (inner, at)), False)
            elif self._completes(token, self.markers.starts):
                is_currently_reasoning = True
                outer = at
                inner = at + 1
        return ParsedReasoningDelta(ReasoningSpan((outer, count), (inner, count)), is_currently_reasoning)

    def reset(self) -> None:
        self._tail = ""
        self.has_passed = False

    def will_reason_after_prompt(self, prompt_token_ids: Sequence[int]) -> bool:
        """True when the prompt opens reasoning. Only the last turn counts: a user's text opens nothing."""
        pieces: list[str] = []
        for token in reversed(prompt_token_ids[-LONGEST_TURN:]):
            pieces.append(self._piece(token))
            if token in self._added and pieces[-1] not in self.markers.all:
                break
        text = "".join(reversed(pieces))
        return _last(text, self.markers.starts) > _last(text, self.markers.ends)

    def _completes(self, token: int, markers: Sequence[str]) -> bool:
        self._tail += self._piece(token)
        if any(marker in self._tail for marker in markers):
            self._tail = ""
            return True
        self._tail = self._tail[-self._longest :]
        beginning = self._tail.lstrip()
        self.has_passed = self.has_passed or not any(
            marker.startswith(beginning[: len(marker)]) for marker in self.markers.starts
        )
        return False


# Most tokens of a turn that are searched.
LONGEST_TURN = 1 << 14


def _last(text: str, markers: Sequence[str]) -> int:
    return max(text.rfind(marker) for marker in markers)


class ThinkReasoning(MarkedReasoning):
    """Reasoning in `<think>` tags: DeepSeek-R1, Qwen3, GLM and most others."""

    markers = THINK


class KimiReasoning(MarkedReasoning):
    markers = KIMI


class MistralReasoning(MarkedReasoning):
    markers = MISTRAL


class GraniteReasoning(MarkedReasoning):
    markers = GRANITE
