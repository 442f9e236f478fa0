"""The answers of SGLang's native dialect: text and ids generated so far, with their `meta_info`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_server.answers.choice import Choice, Finish
from api_server.dialects.sglang.batch import Batch, Item
from api_server.dialects.sglang.schema import GenerateRequest
from interfaces import FIRST_VERSION


@dataclass(frozen=True)
class Naming:
    """The id of each answer: its prompt's, or a fresh one when the prompt has several answers.

    `text_of` gives the text of a token.
    """

    ids: Sequence[str]
    text_of: Callable[[int], str]

    @classmethod
    def of(cls, batch: Batch, choices: Sequence[Choice], text_of: Callable[[int], str]) -> Naming:
        items = [batch.items[choice.request_index] for choice in choices]
        return cls([item.rid if item.n == 1 else uuid.uuid4().hex for item in items], text_of)


def result(body: GenerateRequest, batch: Batch, choice: Choice, naming: Naming) -> dict[str, Any]:
    """The current state of one answer: an event of a stream, or the final object."""
    answer: dict[str, Any] = {
        "text": choice.text,
        "output_ids": choice.token_ids,
        "meta_info": _meta_info(choice, naming.ids[choice.index]),
    }
    item = batch.items[choice.request_index]
    if item.return_logprob:
        answer["meta_info"] |= _logprobs(item, choice, naming.text_of if body.return_text_in_logprobs else None)
    if item.return_hidden_states and choice.finish is not None:
        answer["meta_info"]["hidden_states"] = _hidden_states(choice)
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
        "reasoning_tokens": choice.reasoning_tokens,
        **_versions(choice),
    }
    if choice.finish is not None:
        meta["e2e_latency"] = time.monotonic() - choice.request.received
        meta |= _guesses(choice)
    return meta


def _guesses(choice: Choice) -> dict[str, Any]:
    """What guesses saved; nothing where there were none. Each pass gives a token, and one for each right guess."""
    guessed, right = choice.guesses
    if not guessed:
        return {}
    passes = max(1, choice.completion_tokens - right)
    return {
        "spec_verify_ct": passes,
        "spec_accept_length": choice.completion_tokens / passes,
        "spec_accept_rate": right / guessed,
        "spec_num_correct_drafts": right,
        "spec_num_proposed_drafts": guessed,
    }


def _finish_reason(choice: Choice, finish: Finish | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.kind == "length":
        return {"type": "length", "length": choice.limit}
    if finish.kind == "cancelled":
        return _aborted("Aborted")
    return {"type": "stop", "matched": finish.matched}


def _never_ran(choice: Choice, identifier: str) -> dict[str, Any]:
    """The result of a request that was aborted while it waited."""
    return {
        "id": identifier,
        "finish_reason": _aborted("Abort in waiting queue"),
        "completion_tokens": 0,
        **_versions(choice),
        "e2e_latency": time.monotonic() - choice.request.received,
    }


def _versions(choice: Choice) -> dict[str, Any]:
    """The version that made the last token, and all of them where there were several."""
    known = choice.versions
    last = known[-1][1] if known else FIRST_VERSION
    several = [{"first_token": first, "weight_version": name} for first, name in known]
    return {"weight_version": last, **({"weight_versions": several} if len(known) > 1 else {})}


def _aborted(message: str) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def _logprobs(item: Item, choice: Choice, text_of: Callable[[int], str] | None) -> dict[str, Any]:
    outputs = [
        (token.id, token.logprob, token.top, token.asked, token.text if text_of else None) for token in choice.tokens
    ]
    sides = {"input": _prompt(item, choice, text_of), "output": outputs}
    found: dict[str, Any] = {"output_token_logprobs_length": len(outputs)}
    for side, rows in sides.items():
        found[f"{side}_token_logprobs"] = [[own, token, text] for token, own, _, _, text in rows]
        if item.top_logprobs_num:
            found[f"{side}_top_logprobs"] = [
                None if own is None else _entries(top, top, text_of) for _, own, top, _, _ in rows
            ]
        if item.token_ids_logprob:
            found[f"{side}_token_ids_logprobs"] = [
                None if own is None else _entries(item.token_ids_logprob, asked, text_of)
                for _, own, _, asked, _ in rows
            ]
    return found


def _hidden_states(choice: Choice) -> list[Any]:
    """Hidden states: the prompt's as a matrix, then a vector for each generated token that was an input."""
    prompt = choice.prompt_tokens
    total = choice.prompt_tokens + choice.completion_tokens
    known = sorted(choice.hidden)
    first = [choice.hidden[i].tolist() for i in known if i < prompt]
    return [first, *(choice.hidden[i].tolist() for i in known if prompt <= i < total - 1)]


# A token, its logprob, the most probable tokens', the named tokens', and its text.
Row = tuple[int, float | None, Mapping[int, float], Mapping[int, float], str | None]


def _prompt(item: Item, choice: Choice, text_of: Callable[[int], str] | None) -> list[Row]:
    """The prompt's tokens from the asked position on; nothing comes before the first one, so it has no logprob."""
    start = item.logprob_start_len
    if start < 0:
        return []
    known = choice.prompt_logprobs
    columns = zip(
        choice.prompt_token_ids[choice.first_prompt_logprob :].tolist(),
        known.token_log_probabilities,
        known.top_log_probabilities,
        known.asked_log_probabilities,
        strict=False,  # the prompt is on its way, in events of a choice that waits
    )
    rows: list[Row] = [
        (token, own, top, asked, text_of(token) if text_of else None) for token, own, top, asked in columns
    ]
    if start > 0:
        return rows
    first = int(choice.prompt_token_ids[0])
    return [(first, None, {}, {}, text_of(first) if text_of else None), *rows]


def _entries(
    ids: Iterable[int], logprobs: Mapping[int, float], text_of: Callable[[int], str] | None
) -> list[list[Any]]:
    return [[logprobs[token], token, text_of(token) if text_of else None] for token in ids]
