"""The turns of a conversation: messages, their parts, the tools a model may call and the form its answer must have.

Knows the types and their form, and takes plain dicts for them. Does not know chat templates, or what a model can take:
media are named here by a part each, and their bytes are in the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, field_validator


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class TextContentPart(_Part):
    """A text within a message."""

    type: Literal["text"] = "text"
    text: str


class ImageContentPart(_Part):
    """The place of an image in a message; the images of a request are in the same order."""

    type: Literal["image"] = "image"


class VideoContentPart(_Part):
    """The place of a video in a message; the videos of a request are in the same order."""

    type: Literal["video"] = "video"


class SoundContentPart(_Part):
    """The place of a sound in a message; the sounds of a request are in the same order."""

    type: Literal["audio"] = "audio"


MessageContent = TextContentPart | ImageContentPart | VideoContentPart | SoundContentPart


class TextGenerationRequestMessage(BaseModel):
    """One turn. `content` None is the empty text; items of a list may be plain dicts.

    Further keys (`name`, say) are kept, because chat templates may read them.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[MessageContent] = ""
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, content: Any) -> Any:
        if content is None:
            return ""
        return [_part(item, i) for i, item in enumerate(content)] if isinstance(content, list) else content

    def flatten_content(self) -> dict[str, Any]:
        """Return the message as a dict whose content is one text. ValueError when a part is not a text."""
        flat: dict[str, Any] = {"role": self.role, "content": self.text}
        for name in ("tool_calls", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                flat[name] = value
        return flat

    @property
    def text(self) -> str:
        """Return the text parts, joined by newlines. ValueError when a part is not a text."""
        if isinstance(self.content, str):
            return self.content
        texts = []
        for i, part in enumerate(self.content):
            if not isinstance(part, TextContentPart):
                raise ValueError(f"content[{i}] is of type {part.type!r}: only text parts can be joined to one text")
            texts.append(part.text)
        return "\n".join(texts)

    def count(self, kind: type[MessageContent]) -> int:
        """Count the parts of a kind."""
        return 0 if isinstance(self.content, str) else sum(isinstance(part, kind) for part in self.content)


class TextGenerationRequestFunction(TypedDict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None
    parameters: dict[str, Any]


class TextGenerationRequestTool(TypedDict):
    """A tool that the model may use; `type` is "function"."""

    type: str
    function: TextGenerationRequestFunction


@dataclass
class TextGenerationResponseFormat:
    """The form the answer must have: `type` says which ("json_schema", "json_object", "grammar"...).

    `grammar` wins over `json_schema`. `grammar_enforced`: from the first token on. `tools_forced`: the answer must call
    a tool. `requires_structured_output_flag`: refuse it unless the server runs with structured output.
    `has_json_schema`: the client itself gave a schema.
    """

    type: str
    json_schema: dict[str, Any] = field(default_factory=dict)
    grammar: str | None = None
    grammar_enforced: bool = False
    tools_forced: bool = False
    requires_structured_output_flag: bool = False
    has_json_schema: bool = False

    @classmethod
    def of(cls, given: TextGenerationResponseFormat | Mapping[str, Any]) -> TextGenerationResponseFormat:
        """Return `given`, or the format that a mapping with the same keys describes."""
        return given if isinstance(given, TextGenerationResponseFormat) else cls(**given)


def _part(item: Any, index: int) -> MessageContent:
    path = f"content[{index}]"
    if isinstance(item, _Part):
        return item  # type: ignore[return-value]
    if not isinstance(item, Mapping):
        raise ValueError(f"{path} must be an object with a type, got {type(item).__name__}")
    kind = item.get("type")
    if kind == "text":
        text = item.get("text", item.get("content", ""))
        if not isinstance(text, str):
            raise ValueError(f"{path}.text must be a text, got {type(text).__name__}")
        return TextContentPart(text=text)
    if kind == "image":
        return ImageContentPart()
    if kind == "video":
        return VideoContentPart()
    if kind == "audio":
        return SoundContentPart()
    if kind in ("image_url", "video_url", "audio_url", "input_audio"):
        raise ValueError(f"{path} is a {kind}: load it, put its bytes into the request and a part here")
    raise ValueError(f"{path}.type must be text, image, video or audio, got {kind!r}")
