"""Limits on the number of items of one request, in every dialect.

Texts are bounded by their length; items are bounded by number, before anything is done for each item. Schemas name
these limits, so that they are in the API's document; limits that depend on the model or on a setting are checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field

from api_server.errors import ErrorKind, RequestFailed, invalid
from shared.settings import Settings

# Characters of a text that is tokenized whatever the model's context holds: about a second of a core.
MAX_TEXT = 1 << 19

# Messages of a conversation: each costs a template and a tokenizer some time, and the model some tokens.
MOST_TURNS = 16_384
# Parts and calls of all turns together.
MOST_PARTS = 16_384
MOST_TOOLS = 1024
# Stop tokens: the scheduler compares each new token with each of them.
MOST_STOP_IDS = 256
# Tokens that a request may name to allow them, or to change their scores.
MOST_TOKEN_IDS = 100_000
# Tokens of all prompts of a request, counted for each answer: each answer has its own copy, here and in the scheduler.
MOST_PROMPT_TOKENS = 1 << 24
# Digits of a token id that is written as a text: Python parses no number of unlimited length.
LONGEST_NUMBER = 20

Objects = list[dict[str, Any]]
Turns = Annotated[Objects, Field(max_length=MOST_TURNS)]
Tools = Annotated[Objects, Field(max_length=MOST_TOOLS)]
StopIds = Annotated[list[int], Field(fail_fast=True, max_length=MOST_STOP_IDS)]
Biases = Annotated[dict[str, float], Field(max_length=MOST_TOKEN_IDS)]


class Server(Protocol):
    """The limits of the server on the prompts of a request."""

    @property
    def settings(self) -> Settings: ...

    @property
    def max_model_len(self) -> int | None: ...


def check_parts(turns: Sequence[Any], path: str) -> None:
    """Raises RequestFailed(INVALID) for turns with too many parts and calls."""
    count = sum(sum(_lengths(turn)) for turn in turns)
    if count > MOST_PARTS:
        raise invalid(
            f"{path} has {count} parts and calls in all; at most {MOST_PARTS} are possible: join texts, or send fewer",
            path,
        )


def check_prompts(given: Any, field: str, server: Server, truncated: bool = False) -> None:
    """Raises RequestFailed for more prompts than may wait, and for one with more tokens than fit.

    `given` is a text, token ids, or a list of either; anything else is for others to judge. A prompt that is to be
    `truncated` may be longer than the model's context, and as long as a text may be.
    """
    if not isinstance(given, list) or not given:
        return
    prompts = given if isinstance(given[0], str | list) else [given]
    check_count(len(prompts), "entries", field, server.settings.max_queued)
    longest = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
    if truncated:
        check_count(longest, "tokens", field, MAX_TEXT)
    elif server.max_model_len is not None and longest > server.max_model_len:
        raise too_long(longest, server.max_model_len, field)


def check_vectors(given: Any, field: str, server: Server) -> None:
    """Checks a matrix whose rows stand for tokens, or a list of matrices, like `check_prompts`."""
    batched = (
        isinstance(given, list) and given and isinstance(given[0], list) and isinstance((given[0] or [0])[0], list)
    )
    check_prompts(given if batched or not isinstance(given, list) else [given], field, server)


def check_count(count: int, what: str, field: str, most: int) -> None:
    """Raises RequestFailed(INVALID) for more items than possible."""
    if count > most:
        raise invalid(f"{field} has {count} {what}; at most {most} are possible in one request: send fewer", field)


def check_total(tokens: int, field: str) -> None:
    """Raises RequestFailed(INVALID) when the prompts of one request, counted for each answer, have too many tokens."""
    if tokens > MOST_PROMPT_TOKENS:
        raise invalid(
            f"{field}: the prompts of this request, counted for each of its answers, have {tokens} tokens together; at "
            f"most {MOST_PROMPT_TOKENS} are possible: send fewer at a time",
            field,
        )


def too_long(tokens: int, limit: int, field: str) -> RequestFailed:
    """The error for a prompt that leaves no room for an answer."""
    return RequestFailed(
        ErrorKind.TOO_LONG,
        f"{field} has {tokens} tokens; this model's context holds {limit} tokens, the answer's included",
        field=field,
        numbers={"prompt_tokens": tokens, "limit": limit},
    )


def _lengths(holder: Any) -> Iterator[int]:
    for name in ("content", "output", "tool_calls"):
        parts = holder.get(name) if isinstance(holder, Mapping) else None
        if isinstance(parts, list):
            yield len(parts)
            for part in parts:
                yield from _lengths(part)
