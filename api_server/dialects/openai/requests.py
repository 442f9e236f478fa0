"""Reads OpenAI bodies and maps them to the internal request.

A field that this server cannot serve is refused by name: nothing that changes an answer is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from api_server.body import item_limits, unknown_fields, validation
from api_server.body.unknown_fields import ALWAYS, Refusals, unless
from api_server.chat import documents, images, sounds, videos
from api_server.chat.media_parts import of_messages
from api_server.chat.messages import chat_messages
from api_server.chat.thinking import template_options
from api_server.chat.tools import ToolUse, tool_use
from api_server.constraints import given as given_constraints
from api_server.dialects.openai.responses.schema import ResponsesBody
from api_server.dialects.openai.responses.tools import Toolbox
from api_server.dialects.openai.schema import ChatBody, CompletionBody, ExtendedBody, TextBody
from api_server.errors import invalid, shown, unsupported
from api_server.generation.logit_processors import AllowedProcessors
from api_server.text.stop_patterns import pattern_problem
from api_server.web.endpoint import Call
from interfaces import SEED_LIMIT, LogprobMode, SamplingParamsInput, TextGenerationRequest, TextGenerationRequestMessage

B = TypeVar("B", bound=TextBody)

COMPLETION_MAX_TOKENS = 16
LONGEST_BAD_WORD = 200

_ON = unless(None, False)
# Fields that this server does not implement: their subject, and the values that ask for it.
_REFUSED: Refusals = {
    "prompt_logprobs": ("log probabilities of a prompt that is not echoed", _ON),
    "suffix": ("inserting text before a suffix", unless(None, "")),
    "audio": ("audio", ALWAYS),
    "modalities": ("output other than text", unless(None, [], ["text"])),
    "prediction": ("predicted output", ALWAYS),
    "web_search_options": ("web search", ALWAYS),
    "functions": ("the old form of tools", unless(None, [])),
    "function_call": ("the old form of tools", unless(None, "none", "auto")),
    "use_beam_search": ("beam search", _ON),
    "documents": ("documents for the template", unless(None, [])),
    "chat_template": ("a template sent by a client", ALWAYS),
    "logits_processors": ("logits processors", unless(None, [])),
    "custom_logit_processor": ("logits processors", ALWAYS),
    "return_token_ids": ("returning token ids", _ON),
    "return_hidden_states": ("returning hidden states", _ON),
    "stop_regex": ("stopping at a pattern", unless(None, [])),
    "lora_path": ("adapters", ALWAYS),
    "priority": ("an order among requests", unless(None, 0)),
}

# Known fields that change no answer here, or that `_check` has looked at.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "best_of",
        "request_id",
        "spaces_between_special_tokens",
        "stream_options.include_obfuscation",
        "client_metadata",
    }
)


def read(call: Call, model: type[B], refused: Refusals = MappingProxyType({})) -> B:
    """Reads and checks the body; `refused` are further fields that this endpoint refuses. Raises RequestFailed."""
    raw = call.json
    _check(
        raw, model, {name: rule for name, rule in _REFUSED.items() if name not in model.model_fields} | dict(refused)
    )
    if "prompt" in model.model_fields:
        item_limits.check_prompts(raw.get("prompt"), "prompt", call.server, bool(raw.get("truncate_prompt_tokens")))
    try:
        parsed = validation.parse(model, raw)
    except validation.Mismatch as error:
        raise invalid(str(error), error.field or None) from None
    call.server.check_model(parsed.model or "")
    options = parsed.stream_options
    if options is not None and options.asks_for_usage and not parsed.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    return parsed


def adapter_of(call: Call, given: TextBody) -> str | None:
    """The adapter that a body names. Raises RequestFailed for a name that no adapter has."""
    by_path = given.lora_path if isinstance(given, ExtendedBody) else None
    if not by_path:
        return call.server.check_model(given.model or "")
    if by_path not in call.server.adapters:
        raise invalid(f"lora_path must name a loaded adapter, got {by_path!r:.100}; see /v1/models", "lora_path")
    return by_path


async def chat_request(call: Call, given: ChatBody) -> TextGenerationRequest:
    """The conversation as one internal request."""
    use = await call.apart(lambda: _tool_use(given))
    bounds = images.pixel_bounds(given.mm_processor_kwargs, "mm_processor_kwargs")
    await documents.load(call.server.url_fetcher, given.messages, "messages", documents.file_part)
    await images.load(call.server, given.messages, "messages", images.openai_part, bounds)
    options = videos.io_options(given.media_io_kwargs, "media_io_kwargs")
    await videos.load(call.server, given.messages, "messages", options, bounds)
    await sounds.load(call.server, given.messages, "messages")
    return await call.apart(lambda: _chat_request(call, given, use))


def _tool_use(given: ChatBody) -> ToolUse:
    """Reads the tools and checks that the fields fit together, before any document is fetched. Raises RequestFailed."""
    item_limits.check_parts(given.messages, "messages")
    if given.continue_final_message and given.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    use = tool_use(given.tools, given.tool_choice)
    asked = _max_tokens(given)
    if asked is not None and asked < 1:
        raise invalid(f"max_tokens must be at least 1, got {asked}", "max_tokens")
    if given.audio is not None and not given.is_spoken:
        raise invalid('audio needs modalities with "audio": ["text", "audio"]', "audio")
    if given.top_logprobs and not given.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return use


def _max_tokens(given: ChatBody) -> int | None:
    return given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens


def _chat_request(call: Call, given: ChatBody, use: ToolUse) -> TextGenerationRequest:
    wanted = given.top_logprobs or 0 if given.logprobs else None
    messages = chat_messages(given.messages)
    return TextGenerationRequest(
        **_extended(call, given, _common(call, given, _max_tokens(given), wanted)),
        messages=messages,
        **of_messages(messages),
        tools=use.tools,
        forced_tools=use.forced,
        parallel_tool_calls=given.parallel_tool_calls is not False,
        tool_prompt=given.tool_prompt,
        chat_template_options=template_options(
            given.chat_template_kwargs, given.reasoning_effort, budget=given.max_thinking_tokens
        ),
        parse_answer=True,
        separate_reasoning=given.separate_reasoning is not False,
        stream_reasoning=given.stream_reasoning is not False,
        max_thinking_tokens=given.max_thinking_tokens,
        add_generation_prompt=given.add_generation_prompt is not False,
        continue_final_message=bool(given.continue_final_message),
    )


def completion_requests(call: Call, given: CompletionBody) -> list[TextGenerationRequest]:
    """One internal request for each prompt."""
    common = _extended(call, given, _common(call, given, given.max_tokens, given.logprobs))
    if given.best_of is not None:
        _check_best_of(given.best_of, given)
        common["n"] = given.best_of
        if given.logprobs is None:
            common["sampling"] = replace(common["sampling"], logprobs=LogprobMode.TEMPERED)
    if given.echo and given.logprobs is not None:
        common["sampling"] = replace(common["sampling"], prompt_logprobs_from=0)
    return [
        TextGenerationRequest(**common, prompt=prompt, default_max_new_tokens=COMPLETION_MAX_TOKENS)
        for prompt in _prompts(given.prompt)
    ]


def responses_request(
    call: Call, given: ResponsesBody, messages: list[TextGenerationRequestMessage], tools: Toolbox
) -> TextGenerationRequest:
    """The input of the Responses API as one internal request."""
    effort = (given.reasoning and given.reasoning.effort) or None
    use = tool_use(tools.functions, tools.choice(given.tool_choice))
    common = _common(call, given, given.max_output_tokens, None)
    formatted = given_constraints.response_format(given.text and given.text.format, "text.format")
    if formatted is not None and common["constraint"] is not None:
        raise invalid(
            f"text.format and {common['constraint'].field} exclude each other: give one of them", "text.format"
        )
    common["constraint"] = formatted or common["constraint"]
    return TextGenerationRequest(
        **common,
        messages=messages,
        **of_messages(messages),
        tools=use.tools,
        forced_tools=use.forced,
        parallel_tool_calls=given.parallel_tool_calls is not False,
        chat_template_options=template_options(None, effort, budget=given.max_thinking_tokens),
        parse_answer=True,
        max_thinking_tokens=given.max_thinking_tokens,
    )


def _check_best_of(best_of: int, given: CompletionBody) -> None:
    if best_of < (given.n or 1):
        raise invalid(f"best_of must be at least n, which is {given.n}, got {best_of}", "best_of")
    if given.stream and best_of > (given.n or 1):
        raise invalid("best_of above n cannot be streamed: the best answer is known at the end", "best_of")


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt must not be an empty list", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _common(call: Call, given: TextBody, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    """Arguments of a `TextGenerationRequest` that both endpoints fill alike; `logprobs` None: none are wanted."""
    sampling = _sampling(given, max_tokens)
    if logprobs is not None:
        sampling = replace(sampling, logprobs=LogprobMode.TEMPERED, top_logprobs=logprobs)
    return {
        "request_id": call.request_id,
        "model_name": call.server.model_name,
        "lora_name": adapter_of(call, given),
        "sampling": sampling,
        "token_details": logprobs is not None,
        "n": given.n or 1,
        "add_special_tokens": given.add_special_tokens,
        "truncate_prompt_to": given.truncate_prompt_tokens,
        "keep_stop": bool(given.include_stop_str_in_output),
        "skip_special_tokens": given.skip_special_tokens is not False,
        "cache_salt": given.cache_salt or "",
        "constraint": given_constraints.of_openai_body(call.json),
        "request_path": call.path,
        "received": call.received,
    }


def _extended(call: Call, given: ExtendedBody, common: dict[str, Any]) -> dict[str, Any]:
    """Adds the fields of `ExtendedBody` to the arguments. Raises RequestFailed."""
    problem = pattern_problem(given.stop_patterns)
    if problem is not None:
        raise invalid(problem, "stop_regex")
    sampling = replace(
        common["sampling"],
        allowed_token_ids=given.allowed_token_ids,
        bad_words=_bad_words(call, given.bad_words or []),
        named_processors=_named_processors(call, given),
    )
    if given.prompt_logprobs is not None:
        if given.stream:
            name = "prompt_logprobs"
            raise invalid(f"{name} is not available when stream is true; ask for the whole answer", name)
        most = max(given.prompt_logprobs, sampling.top_logprobs or 0)
        sampling = replace(sampling, top_logprobs=most, prompt_logprobs_from=0)
    salt = common["cache_salt"]
    return common | {
        "request_id": given.rid or common["request_id"],
        "sampling": sampling,
        "keep_stop": common["keep_stop"] or bool(given.no_stop_trim),
        "stop_patterns": given.stop_patterns,
        "cache_salt": f"{given.extra_key}\0{salt}" if given.extra_key else salt,
    }


def _named_processors(call: Call, given: ExtendedBody) -> dict[str, Any]:
    """The logits processors that a body names, with their parameters. Raises RequestFailed."""
    if not (given.custom_logit_processor or given.logits_processors or given.vllm_xargs):
        return {}
    listed: list[tuple[str, dict[str, Any]]] = []
    for i, entry in enumerate(given.logits_processors or []):
        if isinstance(entry, str):
            listed.append((entry, {}))
        elif entry.args:
            text = f"logits_processors[{i}].args has values without names: give them by name, in kwargs"
            raise invalid(text, "logits_processors")
        else:
            listed.append((entry.qualname, entry.kwargs or {}))
    allowed = AllowedProcessors.of(call.server)
    return allowed.named(given.custom_logit_processor or "", given.custom_params, listed, given.vllm_xargs)


def _bad_words(call: Call, words: list[str]) -> list[list[int]]:
    """Token ids of each word with a space before it and without, which are different tokens."""
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        if not word.strip() or len(word) > LONGEST_BAD_WORD:
            raise invalid(f"bad_words[{i}] must be a text of 1 to {LONGEST_BAD_WORD} characters", "bad_words")
        forms = (call.server.tokenizer.ids_of(form) for form in (word, f" {word.lstrip()}"))
        found |= dict.fromkeys(tuple(ids) for ids in forms if ids)
    return [list(ids) for ids in found]


def _sampling(given: TextBody, max_tokens: int | None) -> SamplingParamsInput:
    return SamplingParamsInput(
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        temperature=given.temperature,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=_logit_bias(given.logit_bias),
        max_new_tokens=max_tokens,
        min_new_tokens=given.min_tokens,
        ignore_eos=given.ignore_eos,
        stop=[given.stop] if isinstance(given.stop, str) else given.stop,
        stop_token_ids=given.stop_token_ids,
        seed=None if given.seed is None else given.seed % SEED_LIMIT,  # OpenAI's seeds are signed
    )


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > item_limits.LONGEST_NUMBER:
            raise invalid(f"logit_bias must map token ids to numbers, got the key {shown(token)}", "logit_bias")
        if not -100 <= bias <= 100:
            raise invalid(f"logit_bias[{token}] must be between -100 and 100, got {bias}", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _check(raw: Mapping[str, Any], model: type[TextBody], refused: Refusals) -> None:
    """Refuses known fields that are not implemented; reports unknown ones, once for each name."""
    unknown_fields.check(raw, model, refused, {*_WITHOUT_EFFECT, *given_constraints.EXTRAS})
    best_of = raw.get("best_of")
    if best_of is not None and best_of != (raw.get("n") or 1) and "best_of" not in model.model_fields:
        raise unsupported("best_of", "choosing the best of several answers to a chat")
    if raw.get("echo") and "echo" not in model.model_fields:
        raise unsupported("echo", "repeating the prompt of a chat")
