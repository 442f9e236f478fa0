"""The bodies of Ollama's API, its answers, and the lines of its streams.

Types only; `requests.py` checks how fields fit together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api_server.body.item_limits import Tools, Turns

Text = Annotated[str, Field(max_length=1 << 14)]
DoneReason = Literal["stop", "length", "load", "unload"]
# The level of reasoning where it is a word.
Level = Literal["low", "medium", "high", "max"]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Options(_Body):
    """Sampling values. Those of Ollama's that are not here concern its own engine, and are ignored."""

    num_predict: int | None = Field(None, description="Longest answer in tokens; 0, -1 and -2: all that fit")
    temperature: float | None = Field(None, ge=0, description="0 is greedy")
    top_k: int | None = Field(None, description="Draw from this many most likely tokens; 0 or less for all")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Draw from the most likely tokens that hold this much probability"
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Least probability, relative to the most likely token")
    typical_p: float | None = Field(None, gt=0, le=1, description="Locally typical sampling; 1 for all tokens")
    repeat_penalty: float | None = Field(None, gt=0, description="Divides the scores of tokens that were there")
    repeat_last_n: int | None = Field(
        None, description="0: no repeat_penalty; other values have no effect, the penalty sees the whole text"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, description="Same seed, same answer; below 0: a random one")
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=32)] | None = Field(
        None, description="Texts that end the answer; they are not part of it"
    )
    num_ctx: int | None = Field(None, description="Without effect: the server sets the context's length")
    num_keep: int | None = Field(None, description="Without effect: no prompt is cut")


class Named(_Body):
    """A body that names a model. Older clients call it `name`."""

    model: str | None = Field(None, description="The served model's name, with or without :latest, or nothing")
    name: str | None = Field(None, description="The older name of model")


class _Generating(Named):
    stream: bool | None = Field(None, description="Send the answer line by line as it is generated; default true")
    options: Options | None = None
    format: str | dict[str, Any] | None = Field(None, description='"json", or a JSON schema that the answer has')
    think: bool | str | None = Field(None, description="Whether the model reasons first, or low, medium, high or max")
    keep_alive: float | str | None = Field(None, description="Without effect: the model stays loaded")
    logprobs: bool | None = Field(None, description="Return the log probability of each token")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Most likely tokens to return beside each token")


class ChatBody(_Generating):
    messages: Turns | None = Field(
        None,
        description="Turns: role (system, user, assistant, tool), content, and perhaps images (base64), thinking, "
        "tool_calls and tool_name. None: nothing is generated",
    )
    tools: Tools | None = Field(None, description="Functions that the model may call")


class GenerateBody(_Generating):
    prompt: str | None = Field(None, description="The text; empty: nothing is generated")
    system: str | None = Field(None, description="System prompt")
    images: Annotated[list[str], Field(max_length=1024)] | None = Field(None, description="Images as base64")
    context: Annotated[list[int], Field(fail_fast=True, max_length=1 << 20)] | None = Field(
        None, description="The `context` of an earlier answer, which this prompt continues"
    )
    raw: bool | None = Field(None, description="true: the prompt goes to the model without the chat template")
    suffix: str | None = None
    template: str | None = None


class EmbedBody(Named):
    input: str | list[str] | None = Field(None, description="A text, or a list of texts")
    truncate: bool | None = Field(None, description="false: a text that is too long is refused instead of cut")
    dimensions: int | None = Field(None, ge=1, description="Cut vectors to so many numbers, and give them length 1")
    options: dict[str, Any] | None = Field(None, description="Without effect")
    keep_alive: float | str | None = Field(None, description="Without effect")


class OldEmbedBody(Named):
    prompt: str | None = Field(None, description="A text")
    options: dict[str, Any] | None = Field(None, description="Without effect")
    keep_alive: float | str | None = Field(None, description="Without effect")


class ShowBody(Named):
    verbose: bool | None = Field(None, description="Without effect")


class FunctionCall(BaseModel):
    name: str
    arguments: dict[str, Any]
    index: int


class ToolCall(BaseModel):
    id: str
    function: FunctionCall


class Message(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class _Answer(BaseModel):
    """An answer, or a line of one. Durations are nanoseconds, and in the last line only, as are counts."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: int | None = Field(None, description="Arrival to submission: no model is loaded by a request")
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[Logprob] | None = None


class ChatAnswer(_Answer):
    message: Message


class GenerateAnswer(_Answer):
    response: str
    thinking: str | None = None
    context: list[int] | None = Field(
        None, description="Tokens of the prompt and the answer, for the next request; not with raw"
    )


class EmbedAnswer(BaseModel):
    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    embeddings: list[list[float]]


class OldEmbedAnswer(BaseModel):
    embedding: list[float]


class Details(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(BaseModel):
    models: list[Listed]


class Running(BaseModel):
    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: Details
    expires_at: str
    context_length: int


class Processes(BaseModel):
    models: list[Running]


class Shown(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    modelfile: str
    parameters: str
    template: str
    license: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(BaseModel):
    version: str


class Progress(BaseModel):
    status: str


class ErrorAnswer(BaseModel):
    """An error, in an answer or in the line that ends a failed stream."""

    error: str
