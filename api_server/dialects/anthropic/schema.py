"""The bodies of Anthropic's Messages API, its answers, and the events of its streams.

Types only; `requests.py` checks how fields fit together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from api_server.body.item_limits import MOST_TOOLS, Turns
from api_server.dialects.anthropic.context_edits import ContextManagement

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
StopText = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Metadata(_Body):
    user_id: str | None = Field(None, description="Accepted, without effect")


class Thinking(_Body):
    """The mode and length of reasoning; `adaptive` leaves the length to the model."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="Whether the model reasons before it answers: passed to its chat template (enable_thinking)"
    )
    budget_tokens: int | None = Field(None, ge=1, description="Reasoning that has become so long is ended")
    display: str | None = Field(None, description="Accepted, without effect: reasoning is shown as it is")


class Tool(_Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Calls have exactly this schema")


class ToolChoice(_Body):
    type: Literal["auto", "any", "tool", "none"] = Field(description="any: the answer is a call; tool: of `name`")
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="true: the answer ends with its first call")


class Conversation(_Body):
    """A conversation, to be counted or answered."""

    model: str | None = Field(None, description="The served model's name, or nothing")
    messages: Annotated[Turns, Field(min_length=1)] = Field(
        description="Turns: role (user, assistant, system) and content (a text, or blocks of type text, document, "
        "tool_use, tool_result and thinking). The answer continues a last turn of the assistant"
    )
    system: str | Turns | None = Field(None, description="System prompt: a text, or blocks of type text")
    thinking: Thinking | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = Field(
        None, description="Functions that the model may call"
    )
    tool_choice: ToolChoice | None = None
    context_management: ContextManagement | None = None


class OutputConfig(_Body):
    """The form and the effort of the answer."""

    format: dict[str, Any] | None = Field(
        None, description="The form of the answer: type json_schema, and schema: a JSON schema"
    )
    effort: str | None = Field(None, max_length=32, description="reasoning_effort for the chat template")


class MessagesBody(Conversation):
    max_tokens: int = Field(ge=1, description="Longest answer in tokens; cut to what the context holds")
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Draw from the most likely tokens that hold this much probability"
    )
    top_k: int | None = Field(None, ge=0, description="Draw from this many most likely tokens; 0 for all")
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=32)] | None = Field(
        None, description="Texts that end the answer; they are not part of it"
    )
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(None, description="The older name of output_config.format")
    metadata: Metadata | None = None
    stream: bool | None = Field(None, description="Send the answer as it is generated")


class OriginalCount(BaseModel):
    original_input_tokens: int = Field(description="Before context_management")


class TokenCount(BaseModel):
    input_tokens: int
    context_management: OriginalCount | None = None


class Usage(BaseModel):
    """Tokens of a message; `input_tokens` are those that did not come from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Empty: nothing is signed")


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class AppliedEdit(BaseModel):
    """The report of one edit of `context_management`."""

    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015"]
    cleared_input_tokens: int
    cleared_tool_uses: int | None = None
    cleared_thinking_turns: int | None = None


class AppliedEdits(BaseModel):
    applied_edits: list[AppliedEdit]


class Message(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = Field(description="Null at the start of a stream")
    stop_sequence: str | None
    usage: Usage
    context_management: AppliedEdits | None = Field(None, description="If the request has it")


class MessageStart(BaseModel):
    type: Literal["message_start"]
    message: Message


class ContentBlockStart(BaseModel):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class Ping(BaseModel):
    type: Literal["ping"]


class TextDelta(BaseModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(BaseModel):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(BaseModel):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockStop(BaseModel):
    type: Literal["content_block_stop"]
    index: int


class Ending(BaseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    type: Literal["message_delta"]
    delta: Ending
    usage: Usage
    context_management: AppliedEdits | None = Field(None, description="If the request has it")


class MessageStop(BaseModel):
    type: Literal["message_stop"]


class ErrorDetail(BaseModel):
    type: str
    message: str


class ErrorAnswer(BaseModel):
    """An error, in an answer or in the event that ends a failed stream."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


class StreamEvent(RootModel[Any]):
    root: Annotated[
        MessageStart
        | ContentBlockStart
        | Ping
        | ContentBlockDelta
        | ContentBlockStop
        | MessageDelta
        | MessageStop
        | ErrorAnswer,
        Field(discriminator="type"),
    ]
