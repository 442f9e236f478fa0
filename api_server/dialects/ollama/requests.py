"""Reads Ollama's bodies and maps them to the internal request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from api_server.body import item_limits, unknown_fields, validation
from api_server.body.unknown_fields import Refusals, unless
from api_server.chat import images
from api_server.chat.media_parts import of_messages
from api_server.chat.messages import chat_messages
from api_server.chat.thinking import template_options
from api_server.chat.tools import tool_use
from api_server.constraints.given import ANY_OBJECT, made
from api_server.dialects.ollama.schema import ChatBody, GenerateBody, Named, Options
from api_server.dialects.ollama.turns import image_part, parts, turns
from api_server.errors import invalid, unsupported
from api_server.state import ServerState
from api_server.web.endpoint import BodyForm, Call
from interfaces import (
    SEED_LIMIT,
    Constraint,
    ConstraintKind,
    LogprobMode,
    RequestID,
    SamplingParamsInput,
    TextGenerationRequest,
    TextGenerationRequestMessage,
)

B = TypeVar("B", bound=Named)

_LATEST = ":latest"
_LEVELS = ("low", "medium", "high", "max")

# Fields that are documented and not built.
_REFUSED: Refusals = {
    "suffix": ("inserting text before a suffix", unless(None, "")),
    "template": ("a template sent by a client", unless(None, "")),
}


def name_in(body: Mapping[str, Any]) -> object:
    """The model that a body names, without Ollama's tag for the newest version."""
    found = body.get("model") or body.get("name")
    return found.removesuffix(_LATEST) if isinstance(found, str) else found


# The examples of Ollama's documentation call curl without a content type.
FORM = BodyForm(name_in, any_media_type=True)


def read(call: Call, model: type[B]) -> B:
    """Reads and checks the body. Raises RequestFailed."""
    raw = call.json
    unknown_fields.check(raw, model, _REFUSED)
    try:
        return validation.parse(model, raw)
    except validation.Mismatch as error:
        raise invalid(str(error), error.field or None) from None


def adapter_of(call: Call) -> str | None:
    """The adapter that the body names. Raises RequestFailed(MODEL_NOT_FOUND) for an unknown name."""
    name = name_in(call.json)
    return call.server.check_model(name if isinstance(name, str) else "")


async def chat_request(call: Call, given: ChatBody) -> TextGenerationRequest:
    """The conversation as one internal request."""
    said = await call.apart(lambda: turns(given.messages or (), call.server.sees))
    await call.apart(lambda: item_limits.check_parts(said, "messages"))
    await images.load(call.server, said, "messages", image_part)
    return await call.apart(lambda: _request(call, given, chat_messages(said), given.tools))


async def generate_request(call: Call, given: GenerateBody) -> TextGenerationRequest:
    """The prompt as one internal request: a conversation of one turn, unless it is `raw`."""
    if given.raw:
        return _raw(call, given)
    if given.images and not call.server.sees:
        raise unsupported("images", "an image, which this model cannot see,")
    content: Any = parts(given.prompt or "", given.images, "images") if given.images else given.prompt
    said: list[dict[str, Any]] = [{"role": "system", "content": given.system}] if given.system else []
    said.append({"role": "user", "content": content})
    await images.load(call.server, said, "images", image_part)
    request = await call.apart(lambda: _request(call, given, chat_messages(said), None))
    return await _continued(call, request, given.context) if given.context else request


def _raw(call: Call, given: GenerateBody) -> TextGenerationRequest:
    for name in ("system", "images", "context"):
        if getattr(given, name):
            raise invalid(f"{name} and raw exclude each other: a raw prompt goes to the model as it is", name)
    return TextGenerationRequest(**_common(call, given), prompt=given.prompt)


async def _continued(call: Call, request: TextGenerationRequest, context: list[int]) -> TextGenerationRequest:
    """The request with the tokens of an earlier answer before its prompt."""
    if request.images:
        raise invalid("context and images exclude each other: send the conversation to /api/chat", "context")
    call.server.tokenizer.check_ids(context, "context")
    prompt = await call.server.tokenizer.prompt(request, call.server.max_model_len)
    return replace(request, messages=[], prompt=[*context, *prompt.tokens.tolist()])


def _request(
    call: Call,
    given: ChatBody | GenerateBody,
    messages: list[TextGenerationRequestMessage],
    tools: list[dict[str, Any]] | None,
) -> TextGenerationRequest:
    return TextGenerationRequest(
        **_common(call, given),
        messages=messages,
        **of_messages(messages),
        tools=tool_use(tools, None).tools,
        chat_template_options=_thinking(call.server, given.think),
        parse_answer=True,
        continue_final_message=messages[-1].role == "assistant" and bool(messages[-1].content),
    )


def _common(call: Call, given: ChatBody | GenerateBody) -> dict[str, Any]:
    sampling = _sampling(given.options or Options())
    if given.logprobs or given.top_logprobs:
        sampling = replace(sampling, logprobs=LogprobMode.TEMPERED, top_logprobs=given.top_logprobs or 0)
    return {
        "request_id": RequestID(call.request_id),
        "model_name": call.server.model_name,
        "lora_name": adapter_of(call),
        "sampling": sampling,
        "token_details": bool(given.logprobs or given.top_logprobs),
        "clamp_max_new_tokens": True,
        "constraint": _form(given.format),
        "request_path": call.path,
        "received": call.received,
    }


def _thinking(server: ServerState, think: bool | str | None) -> dict[str, Any]:
    """The template's variables for `think`. Raises RequestFailed where the model cannot reason."""
    if think is None:
        return {}
    if isinstance(think, str) and think not in _LEVELS:
        raise invalid(f"think must be true, false, {', '.join(_LEVELS)}, got {think!r:.100}", "think")
    if think and server.formats.reasoning is None:
        raise unsupported("think", f"reasoning, which {server.model_name!r} does not know,")
    return template_options(None, effort=think) if isinstance(think, str) else template_options(None, enabled=think)


def _form(given: str | dict[str, Any] | None) -> Constraint | None:
    """The form of the answer. Raises RequestFailed."""
    if given is None or given == "":
        return None
    if given == "json":
        return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, field="format")
    if not isinstance(given, dict):
        raise invalid(f'format must be "json" or a JSON schema (an object), got {given!r:.100}', "format")
    return made("format", ConstraintKind.JSON_SCHEMA, given)


def _sampling(given: Options) -> SamplingParamsInput:
    length = given.num_predict
    penalty = 1.0 if given.repeat_last_n == 0 else given.repeat_penalty
    return SamplingParamsInput(
        max_new_tokens=length if length is not None and length > 0 else None,
        temperature=given.temperature,
        any_temperature=True,
        top_k=given.top_k if given.top_k is None or given.top_k > 0 else -1,
        top_p=given.top_p,
        min_p=given.min_p,
        typical_p=given.typical_p,
        repetition_penalty=penalty,
        penalize_prompt=True,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        stop=[given.stop] if isinstance(given.stop, str) else given.stop,
        seed=None if given.seed is None or given.seed < 0 else given.seed % SEED_LIMIT,
    )
