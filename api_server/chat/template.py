"""Renders chat messages to the prompt's text: gives the messages the form that templates expect.

Knows what Jinja templates of Hugging Face models understand. It does not know dialects or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import orjson

from api_server.chat.control_tokens import ControlTokens, parts
from api_server.errors import ErrorKind, RequestFailed, invalid
from interfaces import (
    ImageContentPart,
    SoundContentPart,
    TextContentPart,
    TextGenerationRequest,
    TextGenerationRequestMessage,
    VideoContentPart,
)

# Parameters of apply_chat_template itself: as template variables they would change the server's behaviour.
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

# Stands for an image in a message that a template takes as one text. Unicode's noncharacter, which no text has.
_IMAGE_SIGN = "\U0001fffe"
_VIDEO_SIGN = "\U0001ffff"
# A text that no template writes by itself.
_PROBE = "xyzzy-47"


@dataclass(frozen=True)
class ImageForm:
    """The forms of messages that a template of a model with eyes takes."""

    # Text that stands for an image in a content that is one text.
    mark: str
    # Content may be a list of parts, whose images the template writes itself.
    takes_parts: bool = False
    # Content may be a text.
    takes_texts: bool = True
    # As `mark` and `takes_parts`, for videos.
    video_mark: str = ""
    takes_videos: bool = False


def image_form(
    tokenizer: Any, image: tuple[str, str], video: tuple[str, str] = ("", ""), kind: str = "image"
) -> ImageForm:
    """The forms that the tokenizer's template takes, found by rendering a message in each.

    An image and a video are given by their placeholder and its mark. `kind` is the type of an image's parts; with
    "audio" all that is said of images holds for sounds.
    """
    takes_parts = _takes(tokenizer, kind, image[0])
    takes_texts = _PROBE in _probed(tokenizer, _PROBE) or not takes_parts
    takes_videos = takes_parts and bool(video[0]) and _takes(tokenizer, "video", video[0])
    return ImageForm(image[1], takes_parts, takes_texts, video[1], takes_videos)


def _takes(tokenizer: Any, kind: str, placeholder: str) -> bool:
    """Whether the template writes the placeholder of a part of this kind."""
    found = _probed(tokenizer, [{"type": kind}, {"type": "text", "text": _PROBE}])
    return found.count(placeholder) == 1 and _PROBE in found and "'type'" not in found


def text_form(tokenizer: Any) -> ImageForm | None:
    """The form for a template that takes the parts of a content and drops a plain text; None for all others."""
    if _PROBE in _probed(tokenizer, _PROBE):
        return None
    rendered = _probed(tokenizer, [{"type": "text", "text": _PROBE}])
    return ImageForm("", takes_parts=True, takes_texts=False) if _PROBE in rendered else None


def _probed(tokenizer: Any, content: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except Exception:  # a template that was not made for this form raises whatever comes
        return ""


def size(request: TextGenerationRequest) -> int:
    """Approximate number of characters that a template gets."""
    turns = sum(_length(message.content) + _length(message.reasoning_content) for message in request.messages)
    calls = [message.tool_calls for message in request.messages if message.tool_calls]
    options = dict(request.chat_template_options or {})
    return turns + sum(len(orjson.dumps(given)) for given in (calls, list(request.tools or ()), options) if given)


def _length(content: Any) -> int:
    if isinstance(content, list):
        return sum(len(part.text) for part in content if isinstance(part, TextContentPart))
    return len(content or "")


def render(
    tokenizer: Any,
    request: TextGenerationRequest,
    control: ControlTokens | None = None,
    images: ImageForm | None = None,
) -> list[str]:
    """The prompt's text, in parts, each to be tokenized by itself. Raises RequestFailed(INVALID or TEMPLATE).

    With `control` the names of control tokens in messages are cut, so that they are text; otherwise there is one part.
    `images` is given for a model with eyes.
    """
    options = dict(request.chat_template_options or {})
    for name in options.keys() & _RESERVED:
        raise invalid(f"chat_template_kwargs must not contain {name!r}", "chat_template_kwargs")
    template = _template_of(tokenizer, bool(request.tools))
    messages = [_turn(message, i, template, images) for i, message in enumerate(request.messages)]
    if request.tools and "tools" not in template:
        _append(messages[-1], _introduced(request.tools, request.tool_prompt))
    if request.continue_final_message and not messages[-1]["content"]:
        raise invalid("continue_final_message needs a last message with content to continue", "messages")

    tools: Any = [dict(tool) for tool in request.tools] if request.tools else None
    sign = ""
    if control is not None:
        messages, tools, sign = control.guarded(messages, tools)

    def applied(turns: list[dict[str, Any]]) -> list[str]:
        text: str = tokenizer.apply_chat_template(
            turns,
            tools=tools,
            chat_template=template,
            add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            tokenize=False,
            **options,
        )
        if images is not None:
            text = text.replace(_IMAGE_SIGN, images.mark).replace(_VIDEO_SIGN, images.video_mark)
        return parts(text, sign)

    try:
        try:
            return applied(messages)
        except TypeError:
            # Most templates want a call's arguments as an object; some put them together as a text.
            if not any("tool_calls" in turn for turn in messages):
                raise
            return applied([_with_text_arguments(turn) for turn in messages])
    except jinja2.TemplateError as error:
        raise RequestFailed(ErrorKind.TEMPLATE, f"the chat template refuses the messages: {error}") from None
    except Exception as error:  # a template runs arbitrary expressions over client data: any error may come out
        raise RequestFailed(
            ErrorKind.TEMPLATE, f"the chat template failed on the messages: {type(error).__name__}: {error}"
        ) from None


def _with_text_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    def call(given: dict[str, Any]) -> dict[str, Any]:
        arguments = given["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return given | {"function": given["function"] | {"arguments": text}}

    return turn | {"tool_calls": [call(each) for each in turn["tool_calls"]]} if "tool_calls" in turn else turn


_TOOL_PROMPT = (
    "If one of these functions helps to answer, respond with a JSON object for a call of it and nothing else, in the "
    'form {"name": name of the function, "parameters": object with its arguments}.'
)


def _introduced(tools: Sequence[Any], prompt: str | None) -> str:
    """The tools as text, for a template that has no place for them."""
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    return f"\n---\n{prompt or _TOOL_PROMPT}\n{functions}"


def _template_of(tokenizer: Any, tools: bool) -> str:
    try:
        template: str = tokenizer.get_chat_template(tools=[{}] if tools else None)
    except ValueError:
        raise RequestFailed(
            ErrorKind.TEMPLATE, "this model has no chat template; use a completion endpoint, which takes plain text"
        ) from None
    return template


# Names of the reasoning field in templates that do not use `reasoning_content` (gpt-oss has the first).
_NAMES_OF_REASONING = ("thinking", "reasoning")


def _append(turn: dict[str, Any], text: str) -> None:
    """Adds a text to the end of a turn's content."""
    if isinstance(turn["content"], str):
        turn["content"] += text
    else:
        turn["content"].append({"type": "text", "text": text})


def _content(message: TextGenerationRequestMessage, images: ImageForm | None) -> Any:
    """A message's content as the template takes it. ValueError for a part that it cannot have."""
    # A model takes one of them.
    count = message.count(ImageContentPart) + message.count(SoundContentPart)
    videos = message.count(VideoContentPart)
    if images is None or not (count or videos or images.takes_parts):
        return message.text
    if images.takes_parts and (count or videos or not images.takes_texts):
        if isinstance(message.content, str):
            return [{"type": "text", "text": message.content}]
        return [_part(part, images) for part in message.content]
    if not count and not videos:
        return message.text
    texts = [part.text for part in message.content if isinstance(part, TextContentPart)]
    return "\n".join([_IMAGE_SIGN] * count + [_VIDEO_SIGN] * videos + texts)


def _part(part: Any, images: ImageForm) -> dict[str, str]:
    """A part as the template takes it. One that takes no videos gets a text for a video."""
    if isinstance(part, VideoContentPart) and not images.takes_videos:
        return {"type": "text", "text": _VIDEO_SIGN}
    found: dict[str, str] = part.model_dump(include={"type", "text"})
    return found


def _turn(message: TextGenerationRequestMessage, index: int, template: str, images: ImageForm | None) -> dict[str, Any]:
    """A message in the form of templates: absent fields are absent, and content is one text unless it has images."""
    turn = message.model_dump(exclude_none=True)
    try:
        turn["content"] = _content(message, images)
    except ValueError as error:
        raise RequestFailed(ErrorKind.UNSUPPORTED, f"messages[{index}].{error}", field="messages") from None
    for name in _NAMES_OF_REASONING:
        if message.reasoning_content and f".{name}" in template:
            turn.setdefault(name, message.reasoning_content)
    if message.role == "developer" and "developer" not in template:
        turn["role"] = "system"
    return turn
