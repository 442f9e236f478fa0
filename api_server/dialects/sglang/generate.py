"""POST|PUT /generate in SGLang's dialect: internal requests, and the answer singly, as a list or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.responses import Response

from api_server.answers.choice import Choice
from api_server.body import unknown_fields
from api_server.body.validation import Mismatch, parse
from api_server.chat.media_parts import arguments
from api_server.constraints.given import of_sampling_params
from api_server.dialects.sglang.batch import Batch, Item, expand
from api_server.dialects.sglang.errors import ERROR_STATUSES, error_frame
from api_server.dialects.sglang.media_data import with_media
from api_server.dialects.sglang.rendering import Naming, result
from api_server.dialects.sglang.schema import ErrorResponse, GenerateRequest, GenerateResponse, SamplingParameters
from api_server.dialects.sglang.sessions import remember, resumed
from api_server.dialects.sglang.validation import (
    check_sizes,
    logprob_problem,
    sampling_problem,
    unsupported_field,
    unsupported_sampling,
)
from api_server.errors import invalid, unsupported
from api_server.generation.generation import Generation, generate
from api_server.generation.logit_processors import AllowedProcessors
from api_server.web.endpoint import Call, Document
from api_server.web.sse import DONE, EventStream, frame
from interfaces import SEED_LIMIT, LogprobMode, RequestID, SamplingParamsInput, TextGenerationRequest

DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6

TAG = "sglang"
GENERATE = Document(
    summary="Generate text",
    tag=TAG,
    body=GenerateRequest,
    answer=GenerateResponse,
    frame=GenerateResponse,
    example={"text": "What is 2 + 3?", "sampling_params": {"temperature": 0, "max_new_tokens": 20}},
    errors=dict.fromkeys(ERROR_STATUSES, ErrorResponse),
    description="A list of prompts is answered with a list. Events carry the whole text so far, then `data: [DONE]`.",
)

# Request ids that clients of this process chose and that still run.
_in_flight: set[str] = set()


async def generate_native(call: Call, stream: bool = False) -> Response:
    """Answers a body of this dialect; `stream` streams even if the body does not say so."""
    body, batch = await call.apart(lambda: _checked(call))
    with ExitStack() as cleanup:
        cleanup.enter_context(_claimed(body, batch))
        batch = await resumed(call, body, await with_media(call, batch))
        requests = await call.apart(partial(_all_internal, batch, call, body))
        generation = await generate(call.server, requests)
        naming = Naming.of(batch, generation.choices, call.server.tokenizer.piece)
        if not (stream or body.stream):
            await generation.collect()
            await remember(call, body, batch.items[0], generation.choices[0])
            answers = [result(body, batch, choice, naming) for choice in generation.choices]
            return Response(orjson.dumps(answers if batch.listed else answers[0]), media_type="application/json")
        cleanup.callback(generation.close)
        close = cleanup.pop_all().close
    return EventStream(_events(call, body, batch, generation, naming), close, error_frame)


async def _events(
    call: Call, body: GenerateRequest, batch: Batch, generation: Generation, naming: Naming
) -> AsyncIterator[bytes]:
    shown = [0] * len(generation.choices)
    async for delta in generation:
        choice = generation.choices[delta.index]
        if delta.finish is None and not _is_due(batch, choice, shown[delta.index]):
            continue
        shown[delta.index] = choice.completion_tokens
        if delta.finish is not None:
            await remember(call, body, batch.items[0], choice)
        answer = result(body, batch, choice, naming)
        yield frame(answer | {"index": delta.index} if batch.listed else answer)
    yield DONE


def _is_due(batch: Batch, choice: Choice, shown: int) -> bool:
    """True when an event is due. The first token is sent at once: clients measure the time to it."""
    interval = batch.items[choice.request_index].sampling.stream_interval or 1
    return shown == 0 or choice.completion_tokens - shown >= interval


def _checked(call: Call) -> tuple[GenerateRequest, Batch]:
    body = _read(call)
    try:
        batch = expand(body, call.request_id)
    except ValueError as error:
        raise invalid(str(error)) from None
    if body.session_id is not None and body.session_params is not None:
        raise invalid("session_id and session_params cannot both be set.", "session_id")
    _check(body, batch, call)
    return body, batch


def _read(call: Call) -> GenerateRequest:
    unknown_fields.check(call.json, GenerateRequest, {})
    check_sizes(call.json, call.server)
    try:
        return parse(GenerateRequest, call.json)
    except Mismatch as mismatch:
        name = mismatch.field.rpartition(".")[2]
        if mismatch.kind == "extra_forbidden":
            known = ", ".join(f"`{field}`" for field in SamplingParameters.model_fields)
            raise invalid(f"unknown field `{name}`, expected one of {known}", mismatch.field) from None
        raise invalid(str(mismatch), mismatch.field) from None


def _check(body: GenerateRequest, batch: Batch, call: Call) -> None:
    """Checks values, then unbuilt features: a value out of range is an error on every server."""
    vocab_size = call.server.engine.model.vocab_size or call.server.tokenizer.vocab_size
    samplings = {id(item.sampling): item.sampling for item in batch.items}.values()
    for sampling in samplings:
        problem = sampling_problem(sampling, vocab_size)
        if problem is not None:
            raise invalid(problem)
    for name in (unsupported_field(body), *map(unsupported_sampling, samplings)):
        if name is not None:
            raise unsupported(name, "a value")
    if any(item.return_hidden_states for item in batch.items) and not call.server.settings.hidden_states:
        raise invalid("The server is not configured to return hidden states (--hidden-states)", "return_hidden_states")
    for item in batch.items:
        if isinstance(item.prompt, np.ndarray):
            _check_width(item.prompt, call)
        if item.lora_path and item.lora_path not in call.server.adapters:
            known = ", ".join(call.server.adapters) or "none"
            text = f"Got LoRA adapter that has never been loaded: {item.lora_path[:100]!r}. Loaded adapters: {known}."
            raise invalid(text, "lora_path")
        if item.custom_logit_processor:
            _named_processors(item, call)
        problem = logprob_problem(item, vocab_size) if item.return_logprob else None
        if problem is not None:
            raise invalid(problem)


def _named_processors(item: Item, call: Call) -> dict[str, Any]:
    """The logits processor that an item names, with its parameters. Raises RequestFailed."""
    custom = item.custom_logit_processor
    params = item.sampling.custom_params
    return AllowedProcessors.of(call.server).named(custom, params, custom_field="sampling_params.custom_params")


def _check_width(vectors: NDArray[np.float32], call: Call) -> None:
    wanted = call.server.engine.hidden_size
    given = vectors.shape[1]
    if wanted is not None and given != wanted:
        raise invalid(f"input_embeds must have vectors of {wanted} numbers, got {given}", "input_embeds")


@contextmanager
def _claimed(body: GenerateRequest, batch: Batch) -> Iterator[None]:
    """Holds the ids that the client chose: two running requests must not have one id."""
    rids = {item.rid for item in batch.items} if body.rid is not None else set()
    taken = rids & _in_flight
    if taken:
        raise invalid(f"Duplicate request ID detected: {min(taken)} is still running", "rid")
    _in_flight.update(rids)
    try:
        yield
    finally:
        _in_flight.difference_update(rids)


def _all_internal(batch: Batch, call: Call, body: GenerateRequest) -> list[TextGenerationRequest]:
    return [_internal(item, call, body) for item in batch.items]


def _internal(item: Item, call: Call, body: GenerateRequest) -> TextGenerationRequest:
    given = item.sampling
    try:
        return TextGenerationRequest(
            request_id=RequestID(item.rid),
            prompt=item.prompt if isinstance(item.prompt, str | list) else [0] * len(item.prompt),
            prompt_embeddings=None if isinstance(item.prompt, str | list) else item.prompt,
            **arguments(item.images, item.videos, item.sounds),
            hidden_states=item.return_hidden_states,
            sampling=_with_logprobs(_sampling(item, call), item) if item.return_logprob else _sampling(item, call),
            constraint=of_sampling_params(given),
            model_defaults=False,
            default_max_new_tokens=None if "max_new_tokens" in given.model_fields_set else DEFAULT_MAX_NEW_TOKENS,
            n=item.n,
            keep_stop=bool(given.no_stop_trim),
            stop_patterns=given.stop_patterns,
            skip_special_tokens=given.skip_special_tokens is not False,
            token_details=item.return_logprob,
            cache_salt=f"{item.extra_key}\0{item.cache_salt}" if item.extra_key else item.cache_salt,
            max_thinking_tokens=body.max_thinking_tokens,
            lora_name=item.lora_path or None,
            request_path=call.path,
            received=call.received,
        )
    except ValueError as error:
        raise invalid(str(error)) from None


def _with_logprobs(sampling: SamplingParamsInput, item: Item) -> SamplingParamsInput:
    return replace(
        sampling,
        logprobs=LogprobMode.TEMPERED,
        top_logprobs=item.top_logprobs_num,
        logprob_ids=item.token_ids_logprob,
        prompt_logprobs_from=None if item.logprob_start_len < 0 else item.logprob_start_len,
    )


def _sampling(item: Item, call: Call) -> SamplingParamsInput:
    given = item.sampling
    temperature = item.sampling.temperature
    return SamplingParamsInput(
        temperature=0.0 if temperature is not None and temperature < GREEDY_BELOW else temperature,
        any_temperature=True,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias={int(token): bias for token, bias in (given.logit_bias or {}).items()},
        max_new_tokens=given.max_new_tokens if "max_new_tokens" in given.model_fields_set else None,
        min_new_tokens=given.min_new_tokens,
        ignore_eos=given.ignore_eos,
        stop=given.stop_strings,
        stop_token_ids=[] if given.ignore_eos else given.stop_token_ids,
        named_processors=_named_processors(item, call),
        seed=None if given.sampling_seed is None else given.sampling_seed % SEED_LIMIT,
    )
