"""The answers of SGLang's native dialect: text and ids generated so far, with their `meta_info`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api_server.dialects.sglang.batch import Batch
from api_server.dialects.sglang.schema import GenerateRequest
from api_server.generation import Choice, Finish

WEIGHT_VERSION = "default"


@dataclass(frozen=True)
class Naming:
    """The id of each answer: its prompt's, or a fresh one when the prompt has several answers."""

    ids: Sequence[str]

    @classmethod
    def of(cls, batch: Batch, choices: Sequence[Choice]) -> Naming:
        items = [batch.items[choice.request_index] for choice in choices]
        return cls([item.rid if item.n == 1 else uuid.uuid4().hex for item in items])


def result(body: GenerateRequest, batch: Batch, choice: Choice, naming: Naming) -> dict[str, Any]:
    """One answer as it is now: an event of a stream, or the final object."""
    answer: dict[str, Any] = {
        "text": choice.text,
        "output_ids": choice.token_ids,
        "meta_info": _meta_info(choice, naming.ids[choice.index]),
    }
    if batch.items[choice.request_index].return_logprob:
        answer["meta_info"] |= _logprobs(choice, with_text=bool(body.return_text_in_logprobs))
    if body.return_prompt_token_ids:
        answer["prompt_token_ids"] = choice.prompt_token_ids.tolist()
    return answer


def _meta_info(choice: Choice, identifier: str) -> dict[str, Any]:
    if choice.finish is not None and choice.finish.kind == "cancelled" and choice.queued is None:
        return _never_ran(choice, identifier)
    meta: dict[str, Any] = {
        "id": identifier,
        "finish_reason": _finish_reason(choice, choice.finish),
        "prompt_tokens": choice.prompt_tokens,
        "completion_tokens": choice.completion_tokens,
        "cached_tokens": choice.cached_tokens,
        "weight_version": WEIGHT_VERSION,
    }
    if choice.finish is not None:
        meta["e2e_latency"] = time.monotonic() - choice.request.received
    return meta


def _finish_reason(choice: Choice, finish: Finish | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.kind == "length":
        return {"type": "length", "length": choice.sampling.max_new_tokens}
    if finish.kind == "cancelled":
        return _aborted("Aborted")
    return {"type": "stop", "matched": finish.matched}


def _never_ran(choice: Choice, identifier: str) -> dict[str, Any]:
    """Of a request that was aborted while it waited."""
    return {
        "id": identifier,
        "finish_reason": _aborted("Abort in waiting queue"),
        "completion_tokens": 0,
        "weight_version": WEIGHT_VERSION,
        "e2e_latency": time.monotonic() - choice.request.received,
    }


def _aborted(message: str) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def _logprobs(choice: Choice, with_text: bool) -> dict[str, Any]:
    entries = [[token.logprob, token.id, token.text if with_text else None] for token in choice.tokens]
    return {
        "input_token_logprobs": [],
        "output_token_logprobs": entries,
        "output_token_logprobs_length": len(entries),
    }
