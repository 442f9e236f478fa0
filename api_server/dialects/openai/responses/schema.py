"""The body of /v1/responses, its answer, and the events of its stream. Types only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from api_server.body.item_limits import Tools, Turns
from api_server.dialects.openai.schema import LONGEST_NAME, Body, TextBody

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Reasoning(Body):
    effort: str | None = Field(None, description="Passed to the chat template as reasoning_effort")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Reasoning items have a summary, which is all of the reasoning"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Older name of summary")

    @property
    def wanted_summary(self) -> str | None:
        return self.summary or self.generate_summary


class TextOptions(Body):
    format: dict[str, Any] | None = Field(
        None, description="The form of the answer: type json_schema (name, schema), json_object or text"
    )
    verbosity: str | None = Field(None, description="Accepted, without effect")


class Compaction(Body):
    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=0, description="Tokens above which it would act")


class ResponsesBody(TextBody):
    """One answer to one conversation; the server keeps nothing of it."""

    input: str | Annotated[Turns, Field(min_length=1)] = Field(
        description="What the user says, or items: messages (role and content: a text, or parts of type input_text, "
        "input_image and input_file), calls of tools, their outputs and reasoning, as an answer had them"
    )
    instructions: str | None = Field(None, description="A system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, description="Longest answer in tokens")
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=LONGEST_NAME)]], Field(max_length=16)] | None = Field(
        None, description="Given back as it is"
    )
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    store: bool | None = Field(None, description="Without effect: nothing is stored, and answers say so")
    include: list[str] | None = Field(None, description="reasoning.encrypted_content: reasoning to be sent back")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest turns go if the input does not fit"
    )
    context_management: list[Compaction] | None = Field(
        None, description="Refused when it would act: nothing is compacted"
    )
    tools: Tools | None = Field(
        None,
        description="What the model may call: function, custom, namespace, shell, local_shell, apply_patch; and "
        "image_generation, if tool_choice names it",
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto (default), none, required, a function, allowed_tools, or image_generation"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends with its first call")
    max_thinking_tokens: int | None = Field(
        None, ge=0, description="Reasoning that has become so long is ended; 0 asks the model not to reason"
    )
    max_tool_calls: int | None = Field(None, description="Without effect: the server runs no tools")
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


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(BaseModel):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(BaseModel):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None = Field(None, description="If asked for: opaque, for this server to read back")


class FunctionCallItem(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(BaseModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ShellCallItem(BaseModel):
    id: str
    type: Literal["shell_call", "local_shell_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    action: dict[str, Any]


class PatchCallItem(BaseModel):
    id: str
    type: Literal["apply_patch_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    operation: dict[str, Any]


class ImageCallItem(BaseModel):
    """An image that was painted: the file in base64, null while it is not there."""

    id: str
    type: Literal["image_generation_call"]
    status: Literal["in_progress", "completed", "failed"]
    result: str | None
    # What was painted.
    revised_prompt: str
    output_format: Literal["png", "jpeg", "webp"]
    background: Literal["opaque"]
    size: str


OutputItem = Annotated[
    OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem | ShellCallItem | PatchCallItem | ImageCallItem,
    Field(discriminator="type"),
]


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
    """The format as it was asked for, with further keys."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]


class TextConfig(BaseModel):
    format: Format


class ReasoningConfig(BaseModel):
    effort: str | None
    summary: str | None


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
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningConfig
    store: Literal[False]
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
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
    item: OutputItem


class _ContentEvent(_Event):
    item_id: str
    output_index: int
    content_index: int


class PartEvent(_ContentEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDeltaEvent(_ContentEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[None]


class TextDoneEvent(_ContentEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[None]


class ReasoningDeltaEvent(_ContentEvent):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_ContentEvent):
    type: Literal["response.reasoning_text.done"]
    text: str


class _SummaryEvent(_Event):
    item_id: str
    output_index: int
    summary_index: int


class SummaryPartEvent(_SummaryEvent):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: SummaryText


class SummaryDeltaEvent(_SummaryEvent):
    type: Literal["response.reasoning_summary_text.delta"]
    delta: str


class SummaryDoneEvent(_SummaryEvent):
    type: Literal["response.reasoning_summary_text.done"]
    text: str


class _CallEvent(_Event):
    item_id: str
    output_index: int


class ArgumentsDeltaEvent(_CallEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_CallEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDeltaEvent(_CallEvent):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDoneEvent(_CallEvent):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ImageProgressEvent(_CallEvent):
    type: Literal[
        "response.image_generation_call.in_progress",
        "response.image_generation_call.generating",
        "response.image_generation_call.completed",
    ]


class ImagePreviewEvent(_CallEvent):
    type: Literal["response.image_generation_call.partial_image"]
    partial_image_index: int
    partial_image_b64: str


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ErrorEvent(_Event):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseEvent(RootModel[Any]):
    root: Annotated[
        LifecycleEvent
        | ItemEvent
        | PartEvent
        | TextDeltaEvent
        | TextDoneEvent
        | ReasoningDeltaEvent
        | ReasoningDoneEvent
        | SummaryPartEvent
        | SummaryDeltaEvent
        | SummaryDoneEvent
        | InputDeltaEvent
        | InputDoneEvent
        | ArgumentsDeltaEvent
        | ArgumentsDoneEvent
        | ImageProgressEvent
        | ImagePreviewEvent
        | ErrorEvent,
        Field(discriminator="type"),
    ]
