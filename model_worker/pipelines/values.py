"""What a context's sampling values are for the engine."""

from __future__ import annotations

from dataclasses import replace

from interfaces import LogprobMode, SamplingParams, TextContext


def wants_logprobs(context: TextContext) -> bool:
    return context.log_probabilities > 0 or context.sampling_params.logprobs != LogprobMode.NONE


def values_of(context: TextContext) -> SamplingParams:
    """Return the context's values for the engine: with its own end rules, and without processors, which run here."""
    params = context.sampling_params
    mode = params.logprobs
    if context.log_probabilities and mode == LogprobMode.NONE:
        mode = LogprobMode.TEMPERED
    ends = sorted(context.eos_tracker.eos_token_ids)
    # The chosen token's alone needs no report.
    top = max(params.top_logprobs, context.log_probabilities if context.log_probabilities > 1 else 0)
    return replace(params, stop=None, stop_token_ids=ends, logprobs=mode, top_logprobs=top, logits_processors=None)
