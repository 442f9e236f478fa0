"""Additions of vLLM's clients to OpenAI's answers: token ids, and log probabilities of the prompt.

Log probabilities of the prompt are in whole answers only. Knows the JSON forms and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api_server.answers.choice import Choice
from api_server.dialects.openai.schema import ExtendedBody
from api_server.text.tokenizer import Tokenizer


def add_to_chat(answer: dict[str, Any], body: ExtendedBody, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
    """Adds token ids and prompt log probabilities to a chat answer, which has one prompt for all choices."""
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = _prompt_logprobs(choices[0], body.prompt_logprobs, tokenizer)
    if body.return_token_ids:
        answer["prompt_token_ids"] = choices[0].prompt_token_ids.tolist()
        for rendered, choice in zip(answer["choices"], choices, strict=True):
            rendered["token_ids"] = choice.token_ids


def add_to_completion(
    answer: dict[str, Any], body: ExtendedBody, choices: Sequence[Choice], tokenizer: Tokenizer
) -> None:
    """Adds token ids and prompt log probabilities to a completion. `choices` have the answer's order."""
    for rendered, choice in zip(answer["choices"], choices, strict=True):
        if body.prompt_logprobs is not None:
            rendered["prompt_logprobs"] = _prompt_logprobs(choice, body.prompt_logprobs, tokenizer)
        if body.return_token_ids:
            rendered["prompt_token_ids"] = choice.prompt_token_ids.tolist()
            rendered["token_ids"] = choice.token_ids


class StreamedIds:
    """Token ids of a stream's choices, chunk by chunk; joined they are those of the whole answer."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}

    def next(self, choice: Choice, count: int) -> dict[str, list[int]]:
        """The fields of the next chunk of `choice`: the ids of `count` tokens."""
        sent = self._sent.get(choice.index, 0)
        self._sent[choice.index] = sent + count
        ids: list[int] = choice.context.tokens.generated[sent : sent + count].tolist()
        return {"token_ids": ids}

    def first(self, choice: Choice) -> dict[str, list[int]]:
        """The fields of the first chunk of `choice`: the prompt's ids. Empty in later chunks."""
        if choice.index in self._sent:
            return {}
        self._sent[choice.index] = 0
        return {"prompt_token_ids": choice.prompt_token_ids.tolist()}


def _prompt_logprobs(choice: Choice, most: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """One object a token, by token id: the most probable ones, and the prompt's own. The first token has none."""
    known = choice.prompt_logprobs
    rows = zip(
        choice.prompt_token_ids[1:].tolist(), known.token_log_probabilities, known.top_log_probabilities, strict=True
    )
    return [None, *(_entries(token, own, list(top.items())[:most], tokenizer) for token, own, top in rows)]


def _entries(token: int, own: float, top: list[tuple[int, float]], tokenizer: Tokenizer) -> dict[str, Any]:
    ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
    return {
        str(other): {"logprob": value, "rank": ranks.get(other), "decoded_token": tokenizer.piece(other)}
        for other, value in {token: own, **dict(top)}.items()
    }
