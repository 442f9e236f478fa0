"""From chat messages to the prompt's text: checks the messages, gives them the form templates expect, renders.

Knows OpenAI's message format and what Jinja templates of Hugging Face models understand. It does not know tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import orjson

from api_server.errors import ErrorKind, RequestFailed, invalid
from interfaces.requests import TextGenerationRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Parameters of apply_chat_template itself: as template variables they would change the server's behaviour."""


def render(tokenizer: Any, request: TextGenerationRequest) -> str:
    """The prompt's text. Raises RequestFailed(INVALID or TEMPLATE)."""
    options = dict(request.chat_template_options)
    for name in options.keys() & _RESERVED:
        raise invalid(f"chat_template_kwargs must not contain {name!r}", "chat_template_kwargs")
    template = _template_of(tokenizer, bool(request.tools))
    messages = [_normal(message, i, template) for i, message in enumerate(request.messages)]
    if request.continue_final_message and not messages[-1]["content"]:
        raise invalid("continue_final_message needs a last message with content to continue", "messages")
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in request.tools] if request.tools else None,
            chat_template=template,
            add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            tokenize=False,
            **options,
        )
    except jinja2.TemplateError as error:
        raise RequestFailed(ErrorKind.TEMPLATE, f"the chat template refuses the messages: {error}") from None
    except Exception as error:  # a template runs arbitrary expressions over client data: any error may come out
        raise RequestFailed(
            ErrorKind.TEMPLATE, f"the chat template failed on the messages: {type(error).__name__}: {error}"
        ) from None
    return text


def _template_of(tokenizer: Any, tools: bool) -> str:
    try:
        template: str = tokenizer.get_chat_template(tools=[{}] if tools else None)
    except ValueError:
        raise RequestFailed(
            ErrorKind.TEMPLATE, "this model has no chat template; use a completion endpoint, which takes plain text"
        ) from None
    return template


def _normal(message: Mapping[str, Any], index: int, template: str) -> dict[str, Any]:
    path = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise invalid(f"{path} must be an object with role and content", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{path}.role")
    result = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and "developer" not in template:
        result["role"] = "system"
    result["content"] = _text(message.get("content"), f"{path}.content")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise invalid(f"{path}.tool_calls must be a list", f"{path}.tool_calls")
        result["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif message.get("content") is None and role != "assistant":
        raise invalid(f"{path}.content is missing", f"{path}.content")
    return result


def _text(content: Any, path: str) -> str:
    """Content as one text: most templates know no other form."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{path} must be a text or a list of parts", path)
    return "\n".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return str(part[kind])
    if kind == "text":
        raise invalid(f"{path}.text must be a text", f"{path}.text")
    raise RequestFailed(
        ErrorKind.UNSUPPORTED, f"{path}: content of type {kind!r} is not supported by this model, only text", field=path
    )


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """A call with its arguments as an object, as templates of tool models want them, if they are one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{path}.function must be an object with name and arguments", path)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
