"""Reads the bodies of Anthropic's Messages API and maps them to the internal request.

A field that this server cannot serve is refused by name: nothing that changes an answer is ignored. A value that asks
for nothing passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from api_server.body import item_limits, unknown_fields, validation
from api_server.body.unknown_fields import ALWAYS, Refusals, unless
from api_server.chat import documents, images
from api_server.chat.media_parts import of_messages
from api_server.chat.thinking import template_options
from api_server.chat.tools import listed, tool_use
from api_server.constraints.given import response_format
from api_server.dialects.anthropic.client_tools import as_function, is_run_by_servers
from api_server.dialects.anthropic.context_edits import Count, Edited, Messages, edited
from api_server.dialects.anthropic.documents import document_block, image_block
from api_server.dialects.anthropic.schema import Conversation, MessagesBody, OutputConfig, Tool, ToolChoice
from api_server.dialects.anthropic.turns import system_parts, turns
from api_server.errors import invalid, unsupported
from api_server.web.endpoint import Call
from interfaces import Constraint, RequestID, SamplingParamsInput, TextGenerationRequest, TextGenerationRequestMessage

B = TypeVar("B", bound=Conversation)


def _only_from_code(callers: Any) -> bool:
    return isinstance(callers, list) and bool(callers) and "direct" not in callers


# Fields that are documented and not built.
REFUSED: Refusals = {
    "mcp_servers": ("running tools", unless(None, [])),
    "container": ("running code", unless(None, {})),
    "diagnostics": ("explaining cache misses", unless(None, {})),
    "speed": ("a faster mode", unless(None, "standard")),
    "output_config.task_budget": ("a budget of several answers", ALWAYS),
    "tools.allowed_callers": ("calling tools from code", _only_from_code),
}

# Prompts are cached without being asked, there is one tier in one place, and tools are shown at once.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_control",
        "service_tier",
        "inference_geo",
        "betas",
        "tools.cache_control",
        "tools.defer_loading",
        "tools.eager_input_streaming",
        "tools.input_examples",
    }
)


def read(call: Call, model: type[B]) -> B:
    """Reads and checks the body. Raises RequestFailed."""
    raw = call.json
    if isinstance(raw.get("tools"), list):
        raw["tools"] = listed(raw["tools"], _functions)
    unknown_fields.check(raw, MessagesBody, REFUSED, _WITHOUT_EFFECT)
    try:
        parsed = validation.parse(model, raw)
    except validation.Mismatch as error:
        raise invalid(str(error), error.field or None) from None
    call.server.check_model(parsed.model or "")
    return parsed


@dataclass(frozen=True)
class Asked:
    """A conversation for the model, after the edits of its context."""

    request: TextGenerationRequest
    edited: Edited
    count: Count

    @property
    def edits(self) -> list[dict[str, Any]] | None:
        """The edits that have acted; None when the request asked for no edit."""
        return self.edited.applied


async def request(call: Call, given: Conversation) -> Asked:
    """Maps the conversation to one internal request, with length and sampling if it is to be answered."""
    await call.apart(lambda: item_limits.check_parts(given.messages, "messages"))
    await documents.load(call.server.url_fetcher, given.messages, "messages", document_block)
    await images.load(call.server, given.messages, "messages", image_block)
    counted: list[tuple[Messages, int]] = []

    async def read(messages: Messages) -> TextGenerationRequest:
        return await call.apart(lambda: _request(call, given, messages))

    async def count(messages: Messages) -> int:
        """Counts the tokens of a conversation, and remembers the result."""
        known = next((tokens for same, tokens in counted if same is messages), None)
        if known is not None:
            return known
        prompt = await call.server.tokenizer.prompt(await read(messages), None)
        counted.append((messages, len(prompt.tokens)))
        return len(prompt.tokens)

    left = await edited(given.messages, given.context_management, count)
    return Asked(await read(left.messages), left, count)


def _request(call: Call, given: Conversation, said: Messages) -> TextGenerationRequest:
    messages = turns(said)
    system = []
    if given.system:
        system.append(TextGenerationRequestMessage(role="system", content=system_parts(given.system)))
    choice = given.tool_choice
    thinking = given.thinking
    effort, constraint = _output(given) if isinstance(given, MessagesBody) else ({}, None)
    use = tool_use([_tool(tool) for tool in given.tools or ()], _choice(choice))
    return TextGenerationRequest(
        request_id=RequestID(call.request_id),
        model_name=call.server.model_name,
        lora_name=call.server.check_model(given.model or ""),
        messages=[*system, *messages],
        **of_messages(messages),
        tools=use.tools,
        forced_tools=use.forced,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        sampling=_sampling(given) if isinstance(given, MessagesBody) else None,
        clamp_max_new_tokens=True,
        continue_final_message=messages[-1].role == "assistant",
        constraint=constraint,
        chat_template_options=template_options(
            effort, enabled=None if thinking is None else thinking.type != "disabled"
        ),
        parse_answer=True,
        max_thinking_tokens=None if thinking is None else thinking.budget_tokens,
        request_path=call.path,
        received=call.received,
    )


def _functions(tool: Mapping[str, Any], path: str) -> list[dict[str, Any]] | None:
    """A tool in the form of a custom one; None for one that a server would run."""
    kind = tool.get("type")
    if kind in (None, "custom"):
        return [dict(tool)]
    if isinstance(kind, str) and is_run_by_servers(kind):
        return None
    own = as_function(tool)
    if own is None:
        raise unsupported(f"{path}.type", f"a tool of type {kind!r:.100}")
    return [own]


def _sampling(given: MessagesBody) -> SamplingParamsInput:
    return SamplingParamsInput(
        max_new_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        stop=given.stop_sequences,
    )


def _output(given: MessagesBody) -> tuple[dict[str, Any], Constraint | None]:
    """The effort for the chat template, and the form of the answer."""
    config = given.output_config or OutputConfig()
    if config.format is not None and given.output_format is not None:
        raise invalid("output_format is the older name of output_config.format: give one of them", "output_format")
    field = "output_format" if config.format is None else "output_config.format"
    form = response_format(config.format or given.output_format, field)
    return {} if config.effort is None else {"reasoning_effort": config.effort}, form


def _tool(given: Tool) -> dict[str, Any]:
    """A tool in the form of OpenAI, which chat templates know."""
    function: dict[str, Any] = {
        "name": given.name,
        "description": given.description,
        "parameters": given.input_schema,
        "strict": given.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(given: ToolChoice | None) -> Any:
    if given is None:
        return None
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}
    return "required" if given.type == "any" else given.type
