"""The body of /v1/responses, its answer, and the events of its stream. Types only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from api_server.dialects.openai.schema import Body, TextBody

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Reasoning(Body):
    effort: str | None = Field(None, description="Passed to the chat template as reasoning_effort")


class ResponsesBody(TextBody):
    """One text for one conversation; the server keeps nothing of it."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)] = Field(
        description="What the user says, or messages: role and content (a text, or parts of type input_text)"
    )
    instructions: str | None = Field(None, description="A system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, description="Longest answer in tokens")
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(None, description="Given back as it is")
    reasoning: Reasoning | None = None
    store: Literal[False] | None = Field(None, description="Nothing is stored")
    max_tool_calls: int | None = Field(None, description="Without effect: no tools are called")
    max_tokens: None = Field(None, description="Called max_output_tokens here")
    n: Literal[1] | None = Field(None, description="There is one answer")


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class Failure(BaseModel):
    code: str
    message: str


class Format(BaseModel):
    type: Literal["text"]


class TextConfig(BaseModel):
    format: Format


class ReasoningConfig(BaseModel):
    effort: str | None
    summary: None


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False]
    error: Failure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningConfig
    store: Literal[False]
    temperature: float
    text: TextConfig
    tool_choice: Literal["auto"]
    tools: list[None]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class _Event(BaseModel):
    sequence_number: int


class LifecycleEvent(_Event):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseAnswer


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputMessage


class _ContentEvent(_Event):
    item_id: str
    output_index: int
    content_index: int


class PartEvent(_ContentEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDeltaEvent(_ContentEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[None]


class TextDoneEvent(_ContentEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[None]


class ErrorEvent(_Event):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseEvent(RootModel[Any]):
    root: Annotated[
        LifecycleEvent | ItemEvent | PartEvent | TextDeltaEvent | TextDoneEvent | ErrorEvent,
        Field(discriminator="type"),
    ]
