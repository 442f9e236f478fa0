"""Prepares what a client asked for: prompt tokens, sampling values, lengths that fit.

Every refusal that needs no scheduler happens here. Knows the model's defaults and limits; knows no dialect.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from api_server.answers.formats import AnswerFormats
from api_server.body import item_limits
from api_server.constraints.tool_schemas import Compile, held_to
from api_server.engine import resume
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.state import ServerState
from api_server.text.tokenizer import Prompt, Tokenizer
from interfaces import (
    DUMMY_REQUEST_ID,
    AdapterStatus,
    Constraint,
    ConstraintKind,
    ImageMetadata,
    LogprobMode,
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    TextAndVisionContext,
    TextContext,
    TextGenerationRequest,
    combine,
)


@dataclass(frozen=True)
class Prepared:
    """A request that can be submitted, `request.n` times."""

    request: TextGenerationRequest
    prompt: Prompt
    sampling: SamplingParams
    # The compiled grammar; it begins after the tokens `grammar_begins_after`.
    grammar: str | None = None
    grammar_begins_after: list[int] = field(default_factory=list)
    adapter: AdapterStatus | None = None

    @property
    def only_scores(self) -> bool:
        """True when nothing is generated and log-probabilities of the prompt are wanted."""
        return self.sampling.max_new_tokens == 0 and self.sampling.prompt_logprobs_from is not None

    def context(self, k: int) -> TextContext:
        """The context of the k-th answer. This process and the scheduler hold equal copies of it."""
        sampling = self.sampling
        # The model runs over a prompt only to continue it: the one token is dropped when it comes.
        length = 1 if self.only_scores else sampling.max_new_tokens
        if k or length != sampling.max_new_tokens:
            sampling = replace(sampling, seed=seed_of(sampling.seed, k), max_new_tokens=length)
        made, images = self._images()
        context = made.from_prompt(
            self.prompt.tokens,
            sampling,
            **images,
            request_id=self.request.request_id,
            model_name=self.request.model_name,
            cache_salt=_salt(self.request),
            hidden_states=self.request.hidden_states,
            hidden_from=self.request.hidden_from,
            prompt_embeddings=self.request.prompt_embeddings,
            log_probabilities=self.request.logprobs or int(self.sampling.logprobs != LogprobMode.NONE),
            log_probabilities_echo=self.request.echo and self.request.logprobs > 0,
            grammar=self.grammar,
            target_endpoint=self.request.target_endpoint,
            adapter="" if self.adapter is None else self.adapter.name,
            adapter_digest="" if self.adapter is None else self.adapter.digest,
        )
        context.set_thinking_region(None, self.grammar_begins_after)
        return context

    def _images(self) -> tuple[type[TextContext], dict[str, Any]]:
        """The type of the context, and its fields for images. Each context has its own descriptions of them."""
        if not self.prompt.images:
            return TextContext, {}
        images = [
            ImageMetadata(
                start_idx=placed.start,
                end_idx=placed.end,
                pixel_values=placed.image.pixel_values,
                image_hash=placed.image.image_hash,
                extras=placed.image.extras,
                is_video=placed.image.is_video,
            )
            for placed in self.prompt.images
        ]
        return TextAndVisionContext, {"vision_token_ids": list(self.prompt.vision_token_ids), "images": images}


async def prepare(server: ServerState, batch: Sequence[TextGenerationRequest]) -> list[Prepared]:
    """Prepares a batch. Raises RequestFailed for the first request that cannot be served."""
    total = sum(request.n for request in batch)
    most = server.settings.max_queued
    if total > most:
        raise invalid(f"the request asks for {total} answers at once; at most {most} are possible", "n")
    limit = server.max_model_len
    vocab_size = server.engine.model.vocab_size or None
    formats = server.formats
    found = [await prepare_one(server.tokenizer, formats.opened(each), limit, vocab_size) for each in batch]
    found = [replace(item, adapter=_adapter(server, item.request)) for item in found]
    item_limits.check_total(sum(item.request.n * len(item.prompt.tokens) for item in found), "n")
    compile_constraint = server.constraints.compile
    return [
        await constrained(await _formed(formats, item, compile_constraint), server.tokenizer, compile_constraint)
        for item in found
    ]


def _adapter(server: ServerState, request: TextGenerationRequest) -> AdapterStatus | None:
    """The adapter that a request names. Raises RequestFailed(MODEL_NOT_FOUND)."""
    if request.lora_name is None:
        return None
    adapter = server.adapters.get(request.lora_name)
    if adapter is None:
        names = ", ".join(map(repr, server.adapters)) or "none"
        text = f"the adapter {request.lora_name[:100]!r} does not exist; this server has {names}"
        raise RequestFailed(ErrorKind.MODEL_NOT_FOUND, text, field="lora_name")
    return adapter


async def _formed(formats: AnswerFormats, item: Prepared, compile_constraint: Compile) -> Prepared:
    """Prepares a request with the form of its tool calls, if that is prescribed. Raises RequestFailed."""
    schemas = await held_to(item.request, compile_constraint)
    return replace(item, request=formats.constrained(item.request, item.prompt.tokens, schemas))


async def constrained(
    prepared: Prepared, tokenizer: Tokenizer, compile_constraint: Callable[[Constraint], Awaitable[str]]
) -> Prepared:
    """The prepared request with its constraint compiled, if it has one. Raises RequestFailed."""
    constraint = _constraint_of(prepared.request)
    if constraint is None:
        return prepared
    begins_after = tokenizer.exact(constraint.begins_after) if constraint.begins_after else []
    grammar = await compile_constraint(constraint)
    return replace(prepared, grammar=grammar, grammar_begins_after=begins_after)


def _constraint_of(request: TextGenerationRequest) -> Constraint | None:
    form = request.response_format
    if request.constraint is not None or form is None:
        return request.constraint
    if form.grammar is not None:
        return Constraint(ConstraintKind.LARK, form.grammar, field="response_format")
    if form.json_schema:
        return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(form.json_schema), field="response_format")
    return None


def _salt(request: TextGenerationRequest) -> str:
    """The cache salt: prompts of embeddings share cached prefixes only if their vectors are equal."""
    given = request.prompt_embeddings
    if given is None:
        return request.cache_salt
    return f"{request.cache_salt}\0embeddings:{hashlib.blake2b(given.tobytes(), digest_size=16).hexdigest()}"


def seed_of(seed: int, k: int) -> int:
    """Seed of the k-th answer to a request: the request's own first, then values that follow from it."""
    if k == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


async def prepare_one(
    tokenizer: Tokenizer, request: TextGenerationRequest, max_model_len: int | None, vocab_size: int | None
) -> Prepared:
    """Prepares one request. A limit that is None is not known, and not checked. Raises RequestFailed."""
    if request.request_id == DUMMY_REQUEST_ID:
        raise invalid(f"the request id {DUMMY_REQUEST_ID} is reserved: choose another", "request_id")
    sampling = _sampling(tokenizer, request)
    if request.prompt_embeddings is not None and sampling.prompt_logprobs_from is not None:
        raise invalid("a prompt of embeddings has no tokens, and so no log probabilities", "prompt_logprobs_from")
    prompt = await tokenizer.prompt(request, max_model_len)
    if not len(prompt.tokens):
        raise invalid("the prompt is empty: it must have at least one token", "prompt")
    if vocab_size is not None and prompt.tokens.max() >= vocab_size:
        raise invalid(
            f"the prompt contains token id {prompt.tokens.max()}; this model knows 0 to {vocab_size - 1}", "prompt"
        )
    start = sampling.prompt_logprobs_from or 0
    if start > len(prompt.tokens):
        raise invalid(
            f"the start of the log probabilities, {start}, is higher than the number of input tokens "
            f"({len(prompt.tokens)})",
            "prompt_logprobs_from",
        )
    stream = resume.current.get()
    if stream is not None:
        sampling = _repeatable(request, sampling, stream.name)
    length = _new_tokens(request, sampling, len(prompt.tokens), max_model_len)
    return Prepared(request, prompt, _within_reach(sampling, length, tokenizer.vocab_size))


def _sampling(tokenizer: Tokenizer, request: TextGenerationRequest) -> SamplingParams:
    given = request.sampling
    if given is None:
        return _final(request, tokenizer)
    tokenizer.check_ids(given.stop_token_ids or [], "stop_token_ids")
    tokenizer.check_ids(list(given.logit_bias or ()), "logit_bias")
    tokenizer.check_ids(given.logprob_ids or [], "logprob_ids")
    tokenizer.check_ids(given.allowed_token_ids or [], "allowed_token_ids")
    defaults = tokenizer.defaults
    if not request.model_defaults:
        defaults = SamplingParamsGenerationConfigDefaults(eos_token_id=tokenizer.eos_token_ids)
    least = given.min_new_tokens
    most = given.max_new_tokens
    if least is not None and most is not None and least > most:
        raise invalid(f"min_new_tokens must be at most the maximum of {most}, got {least}", "min_new_tokens")
    # A constrained text ends where its grammar does.
    if given.ignore_eos and request.constraint is None and request.forced_tools is None:
        defaults = replace(defaults, eos_token_id=None)
    try:
        return combine(given, defaults)
    except ValueError as error:
        raise invalid(str(error), str(error).split(" ", 1)[0]) from None


def _repeatable(request: TextGenerationRequest, sampling: SamplingParams, name: str) -> SamplingParams:
    """Sampling values with a seed derived from the stream's name, so that a resumed stream repeats its tokens."""
    if request.sampling is not None and request.sampling.seed is None:
        return replace(sampling, seed=seed_of(0, _number(name)))
    return sampling


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") + 1


def _final(request: TextGenerationRequest, tokenizer: Tokenizer) -> SamplingParams:
    """Sampling values that the model's defaults do not apply to; only the model's end tokens are added."""
    params = request.sampling_params
    ids = [*([] if params.ignore_eos else tokenizer.eos_token_ids), *(params.stop_token_ids or ())]
    tokenizer.check_ids(ids, "stop_token_ids")
    mode = params.logprobs or (LogprobMode.TEMPERED if request.logprobs else LogprobMode.NONE)
    return replace(params, stop_token_ids=list(dict.fromkeys(ids)), logprobs=mode)


def _new_tokens(request: TextGenerationRequest, sampling: SamplingParams, prompt: int, limit: int | None) -> int | None:
    """The number of tokens that may be generated. Raises RequestFailed(TOO_LONG)."""
    asked = (request.sampling or request.sampling_params).max_new_tokens
    wanted = next((n for n in (asked, request.default_max_new_tokens, sampling.max_new_tokens) if n is not None), None)
    if limit is None:
        return wanted
    room = limit - prompt
    if room < (0 if wanted == 0 and sampling.prompt_logprobs_from is None else 1):
        length = {} if asked is None else {"max_new_tokens": asked}
        raise _too_long(f"the prompt has {prompt} tokens", {"prompt_tokens": prompt, "limit": limit} | length, "prompt")
    if asked is not None and asked > room and not request.clamp_max_new_tokens:
        raise _too_long(
            f"max_new_tokens is {asked}, and at most {room} fit behind the {prompt} tokens before the answer",
            {"prompt_tokens": prompt, "max_new_tokens": asked, "limit": limit},
            "max_new_tokens",
        )
    return room if wanted is None else min(wanted, room)


def _within_reach(sampling: SamplingParams, length: int | None, vocab_size: int) -> SamplingParams:
    """Cuts values that mean "as many as there are" to what there is; the worker keeps them in 32 bits."""
    least = sampling.min_new_tokens if length is None else min(sampling.min_new_tokens, length)
    top_k = sampling.top_k if sampling.top_k < vocab_size else -1
    if (length, least, top_k) == (sampling.max_new_tokens, sampling.min_new_tokens, sampling.top_k):
        return sampling
    return replace(sampling, max_new_tokens=length, min_new_tokens=least, top_k=top_k)


def _too_long(what: str, numbers: dict[str, int], field: str) -> RequestFailed:
    return RequestFailed(
        ErrorKind.TOO_LONG,
        f"{what}; this model's context holds {numbers['limit']} tokens, the answer's included",
        field=field,
        numbers=numbers,
    )
