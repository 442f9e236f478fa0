"""The answers of the TGI dialect: the JSON object with its details and timing headers, and the per-token events."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from api_server.answers.choice import Choice, TextDelta, TokenDelta
from api_server.dialects.tgi.generate import is_sampled
from api_server.dialects.tgi.schema import GenerateRequest
from api_server.generation.generation import Generation
from api_server.text.tokenizer import Tokenizer
from api_server.web.endpoint import Call
from api_server.web.sse import frame

_REASONS = {"stop_token": "eos_token", "stop_string": "stop_sequence", "length": "length"}
_INCOMPLETE = {"error": "Incomplete generation", "error_type": "incomplete_generation"}


async def answer(body: GenerateRequest, choices: Sequence[Choice], tokenizer: Tokenizer) -> dict[str, Any]:
    """The JSON object, with the best choice first; `details` only if asked for."""
    choice, *others = choices
    text = _with_prompt(body, choice.text)
    if not body.effective.wants_details:
        return {"generated_text": text}
    details = _summary(body, choice) | await _tokens(body, choice, tokenizer)
    if others:
        details["best_of_sequences"] = [
            {"generated_text": _with_prompt(body, other.text)}
            | _summary(body, other)
            | await _tokens(body, other, tokenizer)
            for other in others
        ]
    return {"generated_text": text, "details": details}


async def events(body: GenerateRequest, generation: Generation, tokenizer: Tokenizer) -> AsyncIterator[bytes]:
    """One event per token; the last one has the whole text."""
    index = 0
    async for delta in generation:
        for position, token in enumerate(delta.tokens):
            index += 1
            last = delta.finish is not None and position == len(delta.tokens) - 1
            event = _event(body, generation.choices[0], index, token, last)
            yield frame(event | {"top_tokens": _top(token, tokenizer)} if token.top else event)
        if _is_cut_short(delta):
            yield frame(_INCOMPLETE)


def is_complete(choice: Choice) -> bool:
    """True when the answer ended for one of the reasons that the dialect knows."""
    return choice.finish is not None and choice.finish.kind in _REASONS


def headers(call: Call, body: GenerateRequest, choice: Choice) -> dict[str, str]:
    """Timing headers, in milliseconds except x-compute-time. Inference is all time after the queue, with prefill."""
    now = time.monotonic()
    queued = choice.queued or 0.0
    inference = (choice.last_token or now) - choice.submitted - queued
    return stream_headers(call, body) | {
        "x-compute-time": f"{now - choice.request.received:.6f}",
        "x-total-time": _milliseconds(now - choice.request.received),
        "x-validation-time": _milliseconds(choice.submitted - choice.request.received),
        "x-queue-time": _milliseconds(queued),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(1, choice.completion_tokens)),
        "x-prompt-tokens": str(choice.prompt_tokens),
        "x-generated-tokens": str(choice.completion_tokens),
    }


def stream_headers(call: Call, body: GenerateRequest) -> dict[str, str]:
    """Headers that are known before the first token."""
    return {"x-compute-type": _compute_type(call), "x-compute-characters": str(len(body.inputs))}


def _is_cut_short(delta: TextDelta) -> bool:
    return delta.finish is not None and (delta.finish.kind not in _REASONS or not delta.tokens)


def _event(body: GenerateRequest, choice: Choice, index: int, token: TokenDelta, last: bool) -> dict[str, Any]:
    complete = last and is_complete(choice)
    return {
        "index": index,
        "token": _token(token),
        "generated_text": _with_prompt(body, choice.text) if complete else None,
        "details": _summary(body, choice) if complete and body.effective.details else None,
    }


def _summary(body: GenerateRequest, choice: Choice) -> dict[str, Any]:
    return {
        "finish_reason": _finish_reason(choice),
        "generated_tokens": choice.completion_tokens,
        "seed": choice.sampling.seed if is_sampled(body.effective) else None,
    }


def _finish_reason(choice: Choice) -> str:
    """The finish reason. `length` wins when the last possible token would have ended the answer, too."""
    limit = choice.limit
    if choice.finish is None or (limit is not None and choice.completion_tokens >= limit):
        return "length"
    return _REASONS[choice.finish.kind]


async def _tokens(body: GenerateRequest, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    """The parts of `details` that have an entry for each token; the first one of the prompt has no logprob."""
    prefill: list[dict[str, Any]] = []
    if body.effective.decoder_input_details:
        ids = choice.prompt_token_ids.tolist()
        columns = zip(
            ids, await tokenizer.pieces(ids), [None, *choice.prompt_logprobs.token_log_probabilities], strict=True
        )
        prefill = [{"id": token, "text": text, "logprob": logprob} for token, text, logprob in columns]
    found: dict[str, Any] = {"prefill": prefill, "tokens": [_token(token) for token in choice.tokens]}
    if body.effective.top_n_tokens:
        found["top_tokens"] = [_top(token, tokenizer) for token in choice.tokens]
    return found


def _top(token: TokenDelta, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {"id": other, "text": tokenizer.piece(other), "logprob": logprob, "special": tokenizer.is_special(other)}
        for other, logprob in token.top.items()
    ]


def _token(token: TokenDelta) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


def _with_prompt(body: GenerateRequest, text: str) -> str:
    return body.inputs + text if body.effective.return_full_text else text


def _milliseconds(seconds: float) -> str:
    return str(max(0, round(seconds * 1000)))


def _compute_type(call: Call) -> str:
    status = call.server.engine.status
    device = status.workers[0].device.partition(":")[0] if status and status.workers else "cpu"
    return os.environ.get("COMPUTE_TYPE", {"cuda": "gpu"}.get(device, device) + "+optimized")
