"""The sampler's values of one row: a record of a numpy table, made of a request's sampling values.

Knows which of a row's wishes need which treatment. Does not know logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from interfaces import SamplingParams
from model_worker.sampling import rng
from model_worker.sampling.draw import Choices

# Beyond these, float32 turns logits into infinities, and the choice is the largest logit or any token anyway.
LEAST_TEMPERATURE = 1e-6
MOST_TEMPERATURE = 1e6

ROW_VALUES = np.dtype(
    [
        ("held", np.bool_),
        ("greedy", np.bool_),
        ("worked", np.bool_),  # needs more than the largest logit
        ("hosted", np.bool_),  # needs what was drawn before, or reports more than a token
        ("waits", np.bool_),  # needs on the host what was drawn before, or is drawn there
        ("reports", np.bool_),  # wants more log-probabilities than the chosen token's:
        ("top_logprobs", np.int32),  # those of so many most probable tokens
        ("named", np.int32),  # and of so many named ones
        ("logprobs", np.int8),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("log_min_p", np.float32),
        ("typical_p", np.float64),
        ("seed", np.uint64),
        ("may_stop_at", np.int64),  # first position at which stop ids are allowed
    ],
    align=True,  # torch takes a column only if its stride is a multiple of the element
)


def row_values(
    params: SamplingParams, prompt_length: int, vocab_size: int, processed: bool = False
) -> tuple[object, ...]:
    """Return a record of ROW_VALUES, in the order of its fields. `processed`: a processor changes its logits."""
    cuts = params.temperature > 0
    biased = params.needs_penalties or params.logit_bias or params.watermark or processed
    restricted = params.allowed_token_ids or params.bad_words
    worked = not params.greedy or biased or restricted or params.logprobs
    reports = params.logprobs or params.reports or params.typical_p < 1 or params.min_new_tokens
    return (
        True,
        params.greedy,
        bool(worked),
        bool(biased or restricted or reports),
        bool(processed or params.watermark or params.typical_p < 1 or any(len(word) > 1 for word in params.bad_words)),
        bool(params.top_logprobs or params.logprob_ids),
        params.top_logprobs,
        len(params.logprob_ids),
        params.logprobs,
        min(max(params.temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE) if cuts else 1.0,
        min(params.top_k, vocab_size) if cuts and params.top_k > 0 else vocab_size,
        params.top_p if cuts else 1.0,
        np.log(params.min_p) if cuts and params.min_p > 0 else -np.inf,
        params.typical_p if cuts else 1.0,
        params.seed,
        first_stop(params, prompt_length),
    )


def first_stop(params: SamplingParams, prompt_length: int) -> int:
    """Return the first position at which tokens that end the row are allowed."""
    return prompt_length + params.min_new_tokens if params.min_new_tokens else 0


def inside_vocabulary(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """Return those of the tokens that the model has."""
    ids = np.array(tokens, np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def known_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """Return the tokens of field `name`; ValueError if the model has not all of them."""
    ids = np.array(tokens, np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{name} names tokens {outside.tolist()}: valid are 0 to {vocab_size - 1}")
    return ids


def choices_of(values: NDArray[np.void], positions: NDArray[np.int64]) -> Choices:
    """Return what the draw takes of rows with these values, whose new tokens will have these positions."""
    names = ("greedy", "top_k", "top_p", "log_min_p", "logprobs")
    return Choices(keys=rng.row_keys(values["seed"], positions), **{name: values[name].copy() for name in names})
