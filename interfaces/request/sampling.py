"""The sampling values of one request.

Knows the values, their ranges and how a request, the model's generation_config and the class defaults combine. It does
not know logits: `model_worker/sampling/sampler.py` applies these values, in the order documented there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from interfaces.wire.codec import InProcess

_log = logging.getLogger("tokenyard")

# Seeds are unsigned 64-bit, the widest any of the served dialects allows (TGI).
SEED_LIMIT = 1 << 64


class LogprobMode:
    """The logarithm of probability that a row reports for its chosen token (natural log, one float32 a token).

    NONE: none. TEMPERED: log-softmax after penalties and temperature, before truncation (OpenAI, SGLang; equal to the
    model's own log-softmax when greedy). WARPED: of the distribution that was sampled from, after truncation (TGI).
    """

    NONE = 0
    TEMPERED = 1
    WARPED = 2


# Most probable tokens that one position may report.
MOST_TOP_LOGPROBS = 64
# Most characters of a stop string: so much of a stream may be held back.
LONGEST_STOP = 1 << 14
# Token ids whose log-probabilities one request may ask for at every position.
MOST_LOGPROB_IDS = 1024


def _random_seed() -> int:
    return secrets.randbits(32)


@dataclass
class SamplingParams:
    """Sampling values of one request; `ValueError` names the field, the value and the valid range.

    `temperature == 0` is greedy, and then `top_k` is 1. `top_k` -1 (or 0) keeps every token. `top_k` or `top_p` None is
    the default. `thinking_temperature` replaces the temperature inside a reasoning block. `penalize_prompt` widens the
    scope of the penalties from the output to prompt + output (TGI). `max_new_tokens` None is the model's limit. `stop`
    are texts, `stop_token_ids` include the EOS ids that apply. `detokenize` False leaves the answer as ids.
    `logits_processors` never cross a process boundary.

    `top_logprobs` most probable tokens and the tokens `logprob_ids` are reported with each token; either switches
    `logprobs` on. `prompt_logprobs_from` asks the same for the prompt's tokens from that position on, where the values
    are the model's own log-softmax; None asks for none. `typical_p` 1 keeps every token. `watermark` marks the text so
    that a test can detect it (Kirchenbauer et al.). `any_temperature` takes temperatures above 2, as SGLang and TGI do.
    `named_processors` are the operator's processors that the request asks for, by name, each with its parameters as
    JSON text. `allowed_token_ids`, if there are any, are the only ones that the answer may have, and `bad_words` are
    sequences of tokens that it may not have.
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    penalize_prompt: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int = field(default_factory=_random_seed)
    logprobs: int = LogprobMode.NONE
    thinking_temperature: float | None = None
    detokenize: bool = True
    logits_processors: Annotated[Sequence[Callable[[Any], None]] | None, InProcess()] = None
    top_logprobs: int = 0
    logprob_ids: list[int] = field(default_factory=list)
    prompt_logprobs_from: int | None = None
    typical_p: float = 1.0
    watermark: bool = False
    any_temperature: bool = False
    named_processors: dict[str, str] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fill_defaults()
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 (all tokens) or at least 1")
        _require(_within(self.top_p, 0.0, 1.0), "top_p", self.top_p, "between 0 and 1")
        _require(_within(self.min_p, 0.0, 1.0), "min_p", self.min_p, "between 0 and 1")
        _require(0 < self.typical_p <= 1, "typical_p", self.typical_p, "above 0 and at most 1")
        self._check_temperature()
        thinking = self.thinking_temperature
        _require(thinking is None or _within(thinking, 0.0, 2.0), "thinking_temperature", thinking, "between 0 and 2")
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(_within(value, -2.0, 2.0), name, value, "between -2 and 2")
        most = self.max_new_tokens
        _require(most is None or _is_count(most), "max_new_tokens", most, "a whole number of at least 0")
        _require(_is_count(self.min_new_tokens), "min_new_tokens", self.min_new_tokens, "a whole number of at least 0")
        _require(0 <= self.seed < SEED_LIMIT, "seed", self.seed, "between 0 and 2**64 - 1")
        _require(all(map(math.isfinite, self.logit_bias.values())), "logit_bias", self.logit_bias, "finite numbers")
        longest = max(map(len, self.stop or ()), default=0)
        _require(longest <= LONGEST_STOP, "stop", f"{longest} characters", f"at most {LONGEST_STOP} characters long")
        _require(all(self.bad_words), "bad_words", self.bad_words, "sequences of at least one token")
        self._check_reports()
        if self.temperature == 0:
            self.top_k = 1

    def _check_temperature(self) -> None:
        value = self.temperature
        if self.any_temperature:
            _require(math.isfinite(value) and value >= 0, "temperature", value, "finite and at least 0")
        else:
            _require(_within(value, 0.0, 2.0), "temperature", value, "between 0 and 2")

    def _check_reports(self) -> None:
        top = self.top_logprobs
        start = self.prompt_logprobs_from
        count = len(self.logprob_ids)
        _require(
            _is_count(top) and top <= MOST_TOP_LOGPROBS,
            "top_logprobs",
            top,
            f"a whole number, 0 to {MOST_TOP_LOGPROBS}",
        )
        _require(count <= MOST_LOGPROB_IDS, "logprob_ids", f"{count} ids", f"at most {MOST_LOGPROB_IDS} token ids")
        _require(start is None or _is_count(start), "prompt_logprobs_from", start, "a whole number of at least 0")
        if (top or self.logprob_ids) and self.logprobs == LogprobMode.NONE:
            self.logprobs = LogprobMode.TEMPERED

    def _fill_defaults(self) -> None:
        # Callers that pass on an optional field of theirs give None.
        for name in ("top_k", "top_p"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(SamplingParams, name))
        if self.top_k == 0:
            self.top_k = -1

    @classmethod
    def from_input_and_generation_config(
        cls,
        input_params: SamplingParamsInput,
        sampling_params_defaults: SamplingParamsGenerationConfigDefaults | None = None,
    ) -> Self:
        """Combine values as `combine`, under the name that the interface documents have for it."""
        return cls(**_combined(input_params, sampling_params_defaults, None))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_penalties(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def reports(self) -> bool:
        """Whether more than the chosen tokens' log-probabilities is asked for."""
        return bool(self.top_logprobs or self.logprob_ids or self.prompt_logprobs_from is not None)

    def log_sampling_info(self) -> None:
        """Log every value at INFO."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        _log.info("sampling: %s", ", ".join(f"{name}={value!r}" for name, value in values))


@dataclass
class SamplingParamsInput:
    """The values that a request gave, field by field; None means "not given"."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    penalize_prompt: bool | None = None
    logit_bias: dict[int, float] | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    logprobs: int | None = None
    thinking_temperature: float | None = None
    detokenize: bool | None = None
    logits_processors: Sequence[Callable[[Any], None]] | None = None
    top_logprobs: int | None = None
    logprob_ids: list[int] | None = None
    prompt_logprobs_from: int | None = None
    typical_p: float | None = None
    watermark: bool | None = None
    any_temperature: bool | None = None
    # Parameters of each processor, as an object or as JSON text.
    named_processors: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None


@dataclass(frozen=True)
class SamplingParamsGenerationConfigDefaults:
    """The values a model's generation_config.json sets; None means that it does not set the field."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    eos_token_id: int | list[int] | None = None
    min_p: float | None = None
    typical_p: float | None = None

    @property
    def values_to_update(self) -> dict[str, Any]:
        """Return the fields that are set, as a new dict; `eos_token_id` is there as the list `stop_token_ids`."""
        values = _given(self)
        if "eos_token_id" in values:
            eos = values.pop("eos_token_id")
            values["stop_token_ids"] = list(eos) if isinstance(eos, Sequence) else [eos]
        return values


def combine(
    given: SamplingParamsInput,
    defaults: SamplingParamsGenerationConfigDefaults | None = None,
    server: SamplingParamsInput | None = None,
) -> SamplingParams:
    """Lay the request's values over the operator's `server` values over the model's defaults over the class defaults.

    `do_sample: false` in the model's config means greedy, unless the request or the server gives a temperature. Stop
    ids are joined, never replaced: the model's EOS ids, the server's, the request's. Raises `ValueError` as
    `SamplingParams` does.
    """
    return SamplingParams(**_combined(given, defaults, server))


def _combined(
    given: SamplingParamsInput,
    defaults: SamplingParamsGenerationConfigDefaults | None,
    server: SamplingParamsInput | None,
) -> dict[str, Any]:
    model = defaults.values_to_update if defaults else {}
    do_sample = model.pop("do_sample", None)
    layers = [model, _given(server) if server else {}, _given(given)]
    if do_sample is False and not any("temperature" in layer for layer in layers[1:]):
        model["temperature"] = 0.0
    values = layers[0] | layers[1] | layers[2]
    if values.get("temperature", 0.0) > 2.0 and not any("temperature" in layer for layer in layers[1:]):
        # Dialects bind requests to 2. A model's own files are not bound.
        values["any_temperature"] = True
    if "named_processors" in values:
        values["named_processors"] = {name: _json(given) for name, given in values["named_processors"].items()}
    stop_ids = [token for layer in layers for token in layer.get("stop_token_ids", ())]
    return values | {"stop_token_ids": list(dict.fromkeys(stop_ids))}


def _given(source: SamplingParamsInput | SamplingParamsGenerationConfigDefaults) -> dict[str, Any]:
    pairs = ((f.name, getattr(source, f.name)) for f in dataclasses.fields(source))
    return {name: value for name, value in pairs if value is not None}


def _json(parameters: Any) -> str:
    return parameters if isinstance(parameters, str) else json.dumps(parameters)


def _within(value: float, low: float, high: float) -> bool:
    # NaN compares false with everything, so it is refused here.
    return low <= value <= high


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(holds: bool, name: str, value: object, valid: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {valid}, got {value!r}")
