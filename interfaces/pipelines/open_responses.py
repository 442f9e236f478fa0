"""The Responses API (`/v1/responses`): its request and its answer, for text as well as images, video and sound.

Types only. Does not know HTTP, and fetches nothing: an image by URL stays a URL, which its reader fetches under its own
rules.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from interfaces.base.request_id import RequestID
from interfaces.pipelines.generation_output import Detail, GenerationOutput, OutputContent, OutputVideoContent, Usage

Unit = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Positive = Annotated[int, Field(gt=0)]
Data = Annotated[str, StringConstraints(pattern=r"^data:")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class InputTextContent(_Model):
    type: Literal["input_text"] = "input_text"
    text: str


class InputImageContent(_Model):
    """An image of a prompt. `image_url` is an https or data: URL."""

    type: Literal["input_image"] = "input_image"
    image_url: str
    detail: Detail = "auto"


class InputFileContent(_Model):
    type: Literal["input_file"] = "input_file"
    file_url: str | None = None
    file_data: str | None = None
    filename: str | None = None


class InputVideoContent(_Model):
    type: Literal["input_video"] = "input_video"
    video_url: str


InputContent = Annotated[
    InputTextContent | InputImageContent | InputFileContent | InputVideoContent, Field(discriminator="type")
]


class _Message(_Model):
    type: Literal["message"] = "message"
    name: str | None = None


class UserMessage(_Message):
    role: Literal["user"] = "user"
    content: str | list[InputContent]


class SystemMessage(_Message):
    role: Literal["system"] = "system"
    content: str | list[InputTextContent]


class DeveloperMessage(_Message):
    role: Literal["developer"] = "developer"
    content: str | list[InputTextContent]


class AssistantMessage(_Message):
    """A turn of the model, or the answer itself (which has `id` and `status`)."""

    role: Literal["assistant"] = "assistant"
    content: str | list[OutputContent]
    tool_calls: list[dict[str, Any]] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


InputMessage = Annotated[UserMessage | SystemMessage | DeveloperMessage | AssistantMessage, Field(discriminator="role")]


class FunctionTool(_Model):
    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionToolChoice(_Model):
    type: Literal["function"] = "function"
    name: str


class AllowedToolsChoice(_Model):
    type: Literal["allowed_tools"] = "allowed_tools"
    tools: list[dict[str, Any]]
    mode: Literal["none", "auto", "required"] = "auto"


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[FunctionToolChoice | AllowedToolsChoice, Field(discriminator="type")]
)


class TextFormat(_Model):
    type: Literal["text"] = "text"


class JsonObjectFormat(_Model):
    type: Literal["json_object"] = "json_object"


class JsonSchemaFormat(_Model):
    type: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Reasoning(_Model):
    effort: Literal["none", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["concise", "detailed", "auto"] | None = None


class StreamOptions(_Model):
    include_usage: bool = False


class _Strict(_Model):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineOptions(_Strict):
    """Options of the engine. `target_endpoint`: the engine that must serve the request."""

    target_endpoint: str | None = None


class _PixelOptions(_Strict):
    negative_prompt: str | None = None
    guidance_scale: float = Field(3.5, ge=0)
    true_cfg_scale: float = Field(1.0, gt=0)
    width: Positive | None = None
    height: Positive | None = None
    steps: Positive | None = None
    cfg_normalization: bool = False
    cfg_truncation: float = 1.0
    flow_shift: float | None = None


class ImageOptions(_PixelOptions):
    width: int | None = Field(None, ge=128, multiple_of=16)
    height: int | None = Field(None, ge=128, multiple_of=16)
    secondary_prompt: str | None = None
    secondary_negative_prompt: str | None = None
    num_images: Positive = 1
    strength: float = Field(0.6, gt=0, le=1)
    output_format: str = "jpeg"
    response_format: Literal["url", "b64_json"] = "b64_json"


class VideoOptions(_PixelOptions):
    frames_per_second: Positive | None = None
    num_frames: Positive | None = None
    guidance_scale_2: float | None = Field(None, ge=0)
    response_format: Literal["url", "b64_json"] = "url"


class ProviderOptions(_Strict):
    """Options that this API has no words for. Unknown keys are refused: a misspelled option must not be lost."""

    max: EngineOptions | None = None
    image: ImageOptions = Field(default_factory=ImageOptions)
    video: VideoOptions | None = None


class OpenResponsesRequestBody(_Model):
    """The body as clients send it; unknown keys are ignored."""

    model: str
    input: str | list[InputMessage]
    citations: dict[str, Any] | None = None
    frequency_penalty: Penalty | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    max_output_tokens: Positive | None = None
    metadata: dict[str, Any] | None = None
    modalities: list[str] | None = None
    n: Positive | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: Penalty | None = None
    reasoning: Reasoning | None = None
    reasoning_reference: str | None = None
    response_format: ResponseFormat | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    tool_choice: ToolChoice | None = None
    tools: list[FunctionTool] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Unit | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    provider_options: ProviderOptions = Field(default_factory=ProviderOptions)


class HttpRequest(Protocol):
    """The members of an HTTP framework's request that are needed here."""

    @property
    def state(self) -> Any: ...

    async def json(self) -> Any: ...


class OpenResponsesRequest(_Model):
    """A body with the name of its request."""

    request_id: RequestID
    body: OpenResponsesRequestBody

    def __str__(self) -> str:
        return str(self.request_id)

    @classmethod
    async def from_fastapi_request(cls, request: HttpRequest) -> Self:
        """Read a request whose `state.request_id` is set; ValueError otherwise, or when the body is wrong."""
        request_id = getattr(request.state, "request_id", None)
        if not request_id:
            raise ValueError("request.state.request_id is missing: set it before the body is read")
        return cls(request_id=RequestID(request_id), body=OpenResponsesRequestBody.model_validate(await request.json()))


class ResponseResource(_Model):
    """The answer. Fields of the request that are echoed are None when unknown."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "completed"
    model: str
    output: list[AssistantMessage]
    usage: Usage | None = None
    metadata: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    truncation: str | None = None
    user: str | None = None

    @classmethod
    def from_generation_output(cls, output: GenerationOutput, model: str) -> Self:
        """Make the answer from a pipeline's output. ValueError when a video's frames have not been encoded yet."""
        for i, part in enumerate(output.output):
            if isinstance(part, OutputVideoContent) and part.frames is not None:
                raise ValueError(f"output[{i}] holds raw frames: encode them, and give video_data or video_url instead")
        message = AssistantMessage(id=f"msg_{output.request_id}_0", status="completed", content=output.output)
        return cls(
            id=f"resp_{output.request_id}",
            created_at=int(time.time()),
            model=model,
            output=[message],
            usage=output.usage,
        )
