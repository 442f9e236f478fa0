"""OpenAI's two forms of log probabilities, written from the details of tokens.

Knows the JSON forms and how tokens read; knows neither requests nor streams.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_server.answers.choice import Choice, TokenDelta
from api_server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Echo:
    """The text before the text of a choice: its prompt, if the request wants it back.

    `offsets` are the places of the prompt's tokens in `text`, when log probabilities are wanted as well.
    """

    text: str
    offsets: Sequence[int] | None = None


async def echo_of(tokenizer: Tokenizer, choice: Choice, with_logprobs: bool) -> Echo:
    """The prompt as text: what the client sent, or its ids decoded."""
    ids: list[int] = choice.prompt_token_ids.tolist()
    text = choice.prompt_text
    if text is None or len(ids) == choice.request.truncate_prompt_to:
        text = await tokenizer.decode(ids, choice.request.skip_special_tokens)
    if not with_logprobs:
        return Echo(text)
    offsets = []
    at = 0
    for piece in await tokenizer.pieces(ids):
        offsets.append(at)
        # A special token that the tokenizer added is in the prompt, and not in its text.
        at += len(piece) if text.startswith(piece, at) else 0
    return Echo(text, offsets)


class LogprobWriter:
    """Writes the logprobs of one request's choices, whole or piece by piece with the same result."""

    def __init__(self, tokenizer: Tokenizer, most: int, as_ids: bool = False) -> None:
        """Makes a writer. `most` alternatives are written of each token. `as_ids`: tokens are named "token_id:5"."""
        self._tokenizer = tokenizer
        self._most = most
        self._as_ids = as_ids
        self._ends: dict[int, int] = {}

    def chat(self, tokens: Sequence[TokenDelta]) -> dict[str, Any]:
        """The logprobs object of a chat choice, or of a chunk."""
        content = [self._entry(token.id, token.logprob) | {"top_logprobs": self._top(token.top)} for token in tokens]
        return {"content": content, "refusal": None}

    def prompt(self, choice: Choice, echo: Echo) -> dict[str, Any]:
        """The logprobs object of an echoed prompt."""
        known = choice.prompt_logprobs
        pairs = zip(known.token_log_probabilities, known.top_log_probabilities, strict=True)
        ids = choice.prompt_token_ids.tolist()
        rows = [(ids[0], None, {}), *((token, own, top) for token, (own, top) in zip(ids[1:], pairs, strict=True))]
        self._ends[choice.index] = len(echo.text)
        return self._columns(rows, echo.offsets or ())

    def completion(self, choice: Choice, tokens: Sequence[TokenDelta]) -> dict[str, Any]:
        """The logprobs object of the next tokens of a choice."""
        at = self._ends.get(choice.index, 0)
        offsets = []
        for token in tokens:
            offsets.append(at)
            at += 0 if token.special and choice.request.skip_special_tokens else len(token.text)
        self._ends[choice.index] = at
        return self._columns([(token.id, token.logprob, token.top) for token in tokens], offsets)

    def _columns(
        self, rows: Sequence[tuple[int, float | None, Mapping[int, float]]], offsets: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._name(token) for token, _, _ in rows],
            "token_logprobs": [own for _, own, _ in rows],
            "top_logprobs": [
                None if own is None else self._by_text(self._cut(top) | {token: own}) for token, own, top in rows
            ],
            "text_offset": list(offsets),
        }

    def _by_text(self, logprobs: Mapping[int, float]) -> dict[str, float]:
        # Among tokens with equal text the most probable one is written.
        ordered = sorted(logprobs.items(), key=lambda item: item[1])
        return dict(reversed({self._name(token): value for token, value in ordered}.items()))

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.piece(token)

    def _top(self, top: Mapping[int, float]) -> list[dict[str, Any]]:
        return [self._entry(token, value) for token, value in self._cut(top).items()]

    def _cut(self, top: Mapping[int, float]) -> dict[int, float]:
        return dict(itertools.islice(top.items(), self._most))

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.raw(token)),
        }


def joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Joins the columns of consecutive completion objects."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
