"""Sampling values that SGLang refuses, in the words its clients match, and features that this server does not build.

Knows no HTTP: a problem is a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from api_server.body.item_limits import LONGEST_NUMBER, check_count, check_prompts, check_vectors
from api_server.dialects.sglang.batch import SPREAD, Item
from api_server.dialects.sglang.schema import GenerateRequest, SamplingParameters
from api_server.state import ServerState
from api_server.text.stop_patterns import pattern_problem
from interfaces import MOST_LOGPROB_IDS, MOST_TOP_LOGPROBS

MAX_STOP_STRINGS = 32

_UNSUPPORTED_FIELDS = (
    "return_sampling_mask",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
)
_UNSUPPORTED_SAMPLING = (
    "beam_width",
    "watermark",
    "choice",
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("top_p", lambda v: 0 < v <= 1, "top_p must be in (0, 1]"),
    ("top_k", lambda v: v == -1 or v >= 1, "top_k must be -1 (disable) or at least 1"),
    ("min_p", lambda v: 0 <= v <= 1, "min_p must be in [0, 1]"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2]"),
    ("presence_penalty", lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2]"),
    ("repetition_penalty", lambda v: 0 < v <= 2, "repetition_penalty must be in (0, 2]"),
    ("max_new_tokens", lambda v: v >= 0, "max_new_tokens must be at least 0"),
    ("n", lambda v: v >= 1, "n must be at least 1"),
    ("stream_interval", lambda v: v >= 1, "stream_interval must be at least 1"),
    (
        "sampling_seed",
        lambda v: -(1 << 63) <= v < 1 << 63,
        "sampling_seed must be an integer in [-2**63, 2**63 - 1]",
    ),
)


def check_sizes(raw: Mapping[str, Any], server: ServerState) -> None:
    """Raises RequestFailed for more prompts, or values for prompts, than may wait, and for more tokens than fit."""
    check_prompts(raw.get("text"), "text", server)
    check_prompts(raw.get("input_ids"), "input_ids", server)
    check_vectors(raw.get("input_embeds"), "input_embeds", server)
    for name, _ in SPREAD:
        if isinstance(raw.get(name), list):
            check_count(len(raw[name]), "entries", name, server.settings.max_queued)


def unsupported_field(body: GenerateRequest) -> str | None:
    """The first field of the request that asks for an unbuilt feature. A value that says "no" asks for nothing."""
    return next((name for name in _UNSUPPORTED_FIELDS if _asks(getattr(body, name))), None)


def unsupported_sampling(given: SamplingParameters) -> str | None:
    """The first sampling value that asks for an unbuilt feature, or None."""
    return next((name for name in _UNSUPPORTED_SAMPLING if _asks(getattr(given, name))), None)


def sampling_problem(given: SamplingParameters, vocab_size: int) -> str | None:
    """The first value out of range, or None."""
    return next(_sampling_problems(given, vocab_size), None)


def logprob_problem(item: Item, vocab_size: int) -> str | None:
    """The first wish for log probabilities that is out of range, or None."""
    if item.logprob_start_len < -1:
        return f"logprob_start_len must be at least -1, got {item.logprob_start_len}."
    if not 0 <= item.top_logprobs_num <= MOST_TOP_LOGPROBS:
        return f"top_logprobs_num must be in [0, {MOST_TOP_LOGPROBS}], got {item.top_logprobs_num}."
    if len(item.token_ids_logprob) > MOST_LOGPROB_IDS:
        return f"token_ids_logprob may name {MOST_LOGPROB_IDS} tokens, got {len(item.token_ids_logprob)}."
    for token in item.token_ids_logprob:
        if not 0 <= token < vocab_size:
            return f"token_ids_logprob must have ids in [0, {vocab_size - 1}], got {token}."
    return None


def _asks(value: Any) -> bool:
    if isinstance(value, list):
        return any(v is not None and v is not False for v in value)
    return value is not None and value is not False and value != "" and value != {}


def _sampling_problems(given: SamplingParameters, vocab_size: int) -> Iterator[str]:
    if given.temperature is not None and not 0 <= given.temperature < math.inf:
        yield f"temperature must be a non-negative finite number, got {given.temperature}."
    for name, holds, rule in _RANGES:
        value = getattr(given, name)
        if value is not None and not holds(value):
            yield f"{rule}, got {value}."
    yield from _minimum_problems(given)
    yield from _stop_problems(given)
    yield from _pattern_problems(given)
    for key in given.logit_bias or {}:
        if not (key.isascii() and key.isdigit() and len(key) <= LONGEST_NUMBER and int(key) < vocab_size):
            yield f"logit_bias must has keys in [0, {vocab_size - 1}], got {key:.100}."
    if sum(bool(getattr(given, name)) for name in _GRAMMARS) > 1:
        yield "Only one of json_schema, regex, ebnf, or structural_tag can be set."


def _minimum_problems(given: SamplingParameters) -> Iterator[str]:
    least = given.min_new_tokens or 0
    most = given.max_new_tokens
    if least < 0 or (most is not None and least > most):
        yield f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}."


def _stop_problems(given: SamplingParameters) -> Iterator[str]:
    if len(given.stop_strings) > MAX_STOP_STRINGS:
        yield f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(given.stop_strings)}."
    if "" in given.stop_strings:
        yield "stop must not contain an empty text, which would end every answer before it starts."


def _pattern_problems(given: SamplingParameters) -> Iterator[str]:
    problem = pattern_problem(given.stop_patterns)
    if problem is not None:
        yield problem
