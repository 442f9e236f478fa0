"""Values that TGI's router refuses, in its order and with its words.

Values are checked here before the prompt is tokenized; `length_problem` is the one rule that needs the token count.
Knows no HTTP: a problem is the text after "Input validation error: ".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from api_server.dialects.tgi.schema import GenerateParameters

MAX_STOP_SEQUENCES = 4
MAX_TOP_N_TOKENS = 5


@dataclass(frozen=True)
class Limits:
    """Limits on the prompt and on prompt + answer, in tokens, and on `best_of`; names of loaded adapters."""

    max_input_tokens: int
    max_total_tokens: int
    max_best_of: int = 1
    adapters: Collection[str] = ()


def first_problem(inputs: str, parameters: GenerateParameters, limits: Limits, streaming: bool) -> str | None:
    """The one problem that upstream would name, or None."""
    return next(_problems(inputs, parameters, limits, streaming), None)


def length_problem(prompt_tokens: int, max_new_tokens: int | None, limits: Limits) -> str | None:
    """The length problem, or None. The total comes first: it is the limit that a client can trade against."""
    new = max(0, limits.max_total_tokens - prompt_tokens) if max_new_tokens is None else max_new_tokens
    if prompt_tokens + new > limits.max_total_tokens:
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {prompt_tokens} `inputs` tokens and {new} `max_new_tokens`"
        )
    if prompt_tokens > limits.max_input_tokens:
        return f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {prompt_tokens}"
    return None


def _problems(inputs: str, parameters: GenerateParameters, limits: Limits, streaming: bool) -> Iterator[str]:
    yield from _best_of(parameters, limits.max_best_of, streaming)
    yield from _ranges(parameters)
    yield from _lists(parameters)
    if parameters.adapter_id and parameters.adapter_id not in limits.adapters:
        known = ", ".join(limits.adapters) or "none"
        yield f"`adapter_id` must name a loaded adapter ({known}). Given: {parameters.adapter_id!r:.100}"
    if not inputs:
        yield "`inputs` cannot be empty"
    truncate = parameters.truncate
    if truncate is not None and not 0 < truncate <= limits.max_input_tokens:
        yield (f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. Given: {truncate}")


def _best_of(parameters: GenerateParameters, most: int, streaming: bool) -> Iterator[str]:
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if streaming and best_of != 1:
        yield "`best_of` != 1 is not supported when streaming tokens"
    if streaming and parameters.decoder_input_details:
        yield "`decoder_input_details` == true is not supported when streaming tokens"
    if best_of != 1 and most == 1:
        yield "`best_of` != 1 is not allowed for this endpoint"
    if not 1 <= best_of <= most:
        yield f"`best_of` must be > 0 and <= {most}. Given: {best_of}"
    names = ("temperature", "top_k", "top_p", "typical_p")
    sampling = parameters.do_sample or any(getattr(parameters, name) is not None for name in names)
    if best_of > 1 and not sampling:
        yield "you must use sampling when `best_of` is > 1"


def _ranges(parameters: GenerateParameters) -> Iterator[str]:
    for name in ("temperature", "repetition_penalty"):
        value = getattr(parameters, name)
        if value is not None and value <= 0:
            yield f"`{name}` must be strictly positive"
    if parameters.frequency_penalty is not None and not -2 <= parameters.frequency_penalty <= 2:
        yield "`frequency_penalty` must be >= -2.0 and <= 2.0"
    # Upstream refuses top_p = 1.0, which is what most clients send for "off"; here it means off.
    if parameters.top_p is not None and not 0 < parameters.top_p <= 1:
        yield "`top_p` must be > 0.0 and < 1.0"
    if parameters.typical_p is not None and not 0 < parameters.typical_p < 1:
        yield "`typical_p` must be > 0.0 and < 1.0"
    for name in ("top_k", "max_new_tokens"):
        value = getattr(parameters, name)
        if value is not None and value <= 0:
            yield f"`{name}` must be strictly positive"


def _lists(parameters: GenerateParameters) -> Iterator[str]:
    stops = parameters.stop_strings
    if len(stops) > MAX_STOP_SEQUENCES:
        yield f"`stop` supports up to {MAX_STOP_SEQUENCES} stop sequences. Given: {len(stops)}"
    if parameters.seed is not None and (parameters.best_of or 1) > 1:
        yield "`seed` must not be set when `best_of` > 1"
    if "" in stops:
        yield "`stop` must not contain an empty text, which would end every answer before it starts"
    if parameters.top_n_tokens is not None and parameters.top_n_tokens > MAX_TOP_N_TOKENS:
        yield f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {parameters.top_n_tokens}"
