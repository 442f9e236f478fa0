"""Guesses at what follows a pipeline's requests: those that their contexts bring, and those that it makes itself.

A context brings them in its `SpecDecodingState`, and learns there which of them held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from interfaces import Join, RequestID, SpecDecodingState, StepResult, TextContext
from model_worker.drafters.base import Drafter, Proposal
from model_worker.drafters.own_text import OwnText
from model_worker.drafters.suffix import EndedAnswers
from shared.setting_forms import MOST_GUESSES


def guesses_of_option(speculate: int | str) -> tuple[int, bool]:
    """Return the most guesses of a request, and whether to take only what saves time, for a number or "auto"."""
    if speculate == "auto":
        return MOST_GUESSES, True
    if not isinstance(speculate, int) or speculate < 0:
        raise ValueError(f"speculate must be auto, or a number of tokens, 0 for none, got {speculate}")
    return speculate, False


class GivenGuesses:
    """The drafter that guesses what contexts bring."""

    name = "given"

    def __init__(self) -> None:
        # By the row.
        self.guesses: dict[int, list[int]] = {}

    def joined(self, join: Join) -> None:
        """A row's guesses come with its steps."""

    def left(self, row: int, answer: NDArray[np.int32]) -> None:
        """A row's guesses come with its steps."""

    def rest(self) -> None:
        """Nothing is put off."""

    def propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        found = {row: np.array(self.guesses.get(row, [])[: most[row]], np.int32) for row in texts}
        return {row: Proposal(tokens, np.ones(len(tokens))) for row, tokens in found.items() if len(tokens)}


class PipelineGuesses:
    """Plans the guesses of each step. The pipeline makes up to `most` for a request that brings none.

    A pipeline that `learns` which guesses save time also guesses by answers that have ended.
    """

    def __init__(self, most: int, learns: bool = False) -> None:
        self._most = most
        self._learns = learns
        self._given = GivenGuesses()

    @property
    def drafters(self) -> list[Drafter]:
        own: list[Drafter] = [OwnText()] if self._most else []
        return [self._given, *own, *([EndedAnswers()] if self._learns else [])]

    def most(self, longest: int) -> int:
        """Return the most guesses of a request in a pass; those of contexts may be any number up to `longest`."""
        return self._most if self._learns else longest

    def begin(self, contexts: Sequence[TextContext]) -> None:
        """Forget which guesses held in earlier calls."""
        for context in contexts:
            if context.draft_state is not None:
                context.draft_state.maybe_accepted_draft_tokens = []

    def plan(
        self, rows: Mapping[int, TextContext], left: Mapping[RequestID, int], longest: int, budget: int
    ) -> NDArray[np.int32] | None:
        """Return how many guesses each row of a step may verify; None for a step that verifies none.

        `left` are the tokens that each request may still get in this call, `longest` is a request's greatest length,
        and `budget` the tokens that the pass may have beside its own. Processors of a request see one row of logits
        in a pass, so no guesses are made beside them.
        """
        contexts = rows.values()
        plain = all(context.tokens.active_length == 1 for context in contexts)
        if not plain or any(context.sampling_params.logits_processors for context in contexts):
            return None
        self._given.guesses = {row: _brought(context) for row, context in rows.items()}
        ahead = []
        for row, context in rows.items():
            most = longest if context.max_length is None else min(longest, context.max_length)
            wanted = len(self._given.guesses[row]) or self._most
            count = max(0, min(wanted, left[context.request_id] - 1, most - 1 - len(context.tokens), budget))
            ahead.append(count)
            budget -= count
        return np.array(ahead, np.int32) if any(ahead) else None

    def note(self, context: TextContext, drawn: Sequence[int]) -> None:
        """Tell a context which of its guesses held: `drawn` are its new tokens, of which all but the last were guessed.

        What it guessed of tokens that are still to be drawn stays, if the guesses before held.
        """
        state = context.draft_state
        if state is None and len(drawn) == 1:
            return
        state = state or context.spec_decoding_state
        guesses = state.draft_tokens_to_verify
        held = 0
        while held < min(len(guesses), len(drawn)) and guesses[held] == drawn[held]:
            held += 1
        state.maybe_accepted_draft_tokens += drawn[: max(held, len(drawn) - 1)]
        state.draft_tokens_to_verify = list(guesses[held:]) if held == len(drawn) else []


def _brought(context: TextContext) -> list[int]:
    state: SpecDecodingState | None = context.draft_state
    return [] if state is None else state.draft_tokens_to_verify


def following_tokens(result: StepResult) -> dict[int, list[tuple[int, float | None]]]:
    """Return the tokens after each row's first one, whose guesses were right, and their log-probabilities."""
    if result.more is None:
        return {}
    found: dict[int, list[tuple[int, float | None]]] = {}
    rows = np.repeat(result.more.rows, result.more.counts).tolist()
    logprobs = [None] * len(rows) if result.more_logprobs is None else result.more_logprobs.tolist()
    for row, token, logprob in zip(rows, result.more.tokens.tolist(), logprobs, strict=True):
        found.setdefault(row, []).append((token, logprob))
    return found
