"""The bodies of OpenAI's text endpoints, with the extra parameters that vLLM's clients send.

Types only: rules between values are in `requests.py`, ranges of sampling values in `interfaces/request/sampling.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api_server.body.item_limits import MOST_TOKEN_IDS, Biases, StopIds, Tools, Turns
from api_server.dialects.openai.spoken_schema import AnswerAudio, AudioDelta, AudioWish

FinishReason = Literal["stop", "length", "tool_calls"]


class Body(BaseModel):
    """Unknown keys are ignored, as by the servers whose clients send them; `requests.py` logs each name once."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


MOST_LOGPROBS = 20
# Characters of a value that is only carried, or returned.
LONGEST_NAME = 65_536


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="One more chunk at the end with the token counts")
    continuous_usage_stats: bool | None = Field(None, description="Token counts so far in every chunk")

    @property
    def asks_for_usage(self) -> bool:
        return bool(self.include_usage or self.continuous_usage_stats)


class TextBody(Body):
    """Fields that chat and plain completions share."""

    model: str | None = Field(None, description="The served model's name, or nothing")
    max_tokens: int | None = Field(None, description="Longest answer in tokens")
    temperature: float | None = Field(None, description="0 is greedy; above 1 flattens the distribution")
    top_p: float | None = Field(None, description="Draw from the most likely tokens that hold this much probability")
    n: int | None = Field(None, ge=1, le=128, description="Answers per prompt")
    stream: bool | None = Field(None, description="Send the answer as it is generated")
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=32)] | None = Field(
        None, description="Texts that end the answer; they are not part of it"
    )
    presence_penalty: float | None = Field(None, description="Lowers the score of tokens that occurred, -2 to 2")
    frequency_penalty: float | None = Field(None, description="Lowers it by how often they occurred, -2 to 2")
    logit_bias: Biases | None = Field(None, description="Added to the score of token ids, -100 to 100")
    seed: int | None = Field(
        None, ge=-(1 << 63), le=(1 << 64) - 1, description="Seed of the random draws; the same seed gives the same text"
    )
    top_k: int | None = Field(None, description="Draw from this many most likely tokens; -1 for all")
    min_p: float | None = Field(None, description="Drop tokens less likely than this share of the likeliest one")
    repetition_penalty: float | None = Field(None, description="Above 1 penalises tokens of the answer so far")
    min_tokens: int | None = Field(None, description="No stop token and no stop string before this many tokens")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token")
    stop_token_ids: StopIds | None = Field(None, description="Further tokens that end it")
    include_stop_str_in_output: bool | None = Field(None, description="Keep what ended the answer in its text")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true)")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds BOS and the like; default: to plain prompts only"
    )
    truncate_prompt_tokens: int | None = Field(None, ge=1, description="Keep only the last n tokens of the prompt")
    cache_salt: str | None = Field(None, description="Share cached prompts only with requests of the same salt")
    user: str | None = Field(None, max_length=LONGEST_NAME, description="Accepted, without effect")
    response_format: dict[str, Any] | None = Field(
        None,
        description="The form of the answer: json_schema, json_object, structural_tag or text; TGI's json or regex",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="The same in vLLM's words: one of json, regex, choice, grammar, structural_tag, json_object"
    )


# The constructor that mypy's plugin makes up has an argument `kwargs` already.
class NamedProcessor(Body):  # type: ignore[no-redef]
    """A logits processor that vLLM's clients name."""

    qualname: str = Field(max_length=LONGEST_NAME, description="Its name")
    args: list[Any] | None = Field(None, description="Refused unless empty: parameters have names")
    kwargs: dict[str, Any] | None = Field(None, description="Its parameters")


class ExtendedBody(TextBody):
    """Additions of SGLang's and vLLM's clients to chat and plain completions."""

    prompt_logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="Return the prompt's log probabilities, and so many alternatives"
    )
    lora_path: str | None = Field(None, description="Name of a loaded adapter, which `model` can name, too")
    return_token_ids: bool | None = Field(None, description="Return token ids of prompt and answer")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Tokens of log probabilities read "token_id:5", so that none reads like another'
    )
    stop_regex: str | Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Patterns in RE2's syntax that end the answer; what matched stays in it"
    )
    no_stop_trim: bool | None = Field(None, description="As include_stop_str_in_output")
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = Field(
        None, description="Words that the answer may not have"
    )
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MOST_TOKEN_IDS)] | None = (
        Field(None, description="The only tokens that the answer may have")
    )
    extra_key: str | None = Field(None, description="As cache_salt; both count")
    custom_logit_processor: str | None = Field(
        None, description="Name of a logits processor that the server was started with (--logit-processors)"
    )
    custom_params: dict[str, Any] | None = Field(None, description="What the custom logit processor is given")
    logits_processors: Annotated[list[str | NamedProcessor], Field(fail_fast=True, max_length=16)] | None = Field(
        None, description="Names of logits processors that the server was started with, or objects with parameters"
    )
    vllm_xargs: dict[str, Any] | None = Field(
        None, description="Parameters of logits processors, by name; each goes to the processors that have it"
    )
    rid: str | None = Field(None, min_length=1, max_length=256, description="Name of the request, for aborting it")

    @property
    def stop_patterns(self) -> list[str]:
        return [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex or []


class Message(BaseModel):
    """A chat message, for the OpenAPI document; `template.py` checks the messages that arrive."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(ExtendedBody):
    messages: Annotated[Turns, Field(min_length=1)] = Field(
        description="The conversation: role and content (a text, or parts of type text, file, image_url and video_url)"
    )
    max_completion_tokens: int | None = Field(None, description="Newer name of max_tokens")
    logprobs: bool | None = Field(None, description="Return the log probability of each token of the answer")
    top_logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="Report so many most likely tokens at each place; needs logprobs"
    )
    tools: Tools | None = Field(None, description="Functions that the model may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description="auto (default); none hides the tools from the model; required, or the name of a tool: the answer "
        "is a call of one",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends with its first call")
    tool_prompt: str | None = Field(
        None, description="What introduces the tools to a model whose chat template has no place for them"
    )
    reasoning_effort: str | None = Field(
        None, description="For the chat template; none switches reasoning off, anything else on"
    )
    separate_reasoning: bool | None = Field(None, description="false leaves reasoning in the text, with its marks")
    stream_reasoning: bool | None = Field(None, description="false sends reasoning at once when it is complete")
    max_thinking_tokens: int | None = Field(
        None, ge=0, description="Reasoning that has become so long is ended; 0 asks the model not to reason"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template")
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="min_pixels and max_pixels of each image, where the model takes images of any size"
    )
    media_io_kwargs: dict[str, Any] | None = Field(
        None, description="video: fps or num_frames of each video that does not say it itself"
    )
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn (default true)")
    continue_final_message: bool | None = Field(None, description="Continue the last message instead of a new turn")
    modalities: Annotated[list[Literal["text", "audio"]], Field(max_length=2)] | None = Field(
        None, description="With audio the answer is spoken by a model of this server that speaks"
    )
    audio: AudioWish | None = Field(None, description="How it is spoken; needs modalities with audio")

    @property
    def is_spoken(self) -> bool:
        return "audio" in (self.modalities or [])


TokenIds = Annotated[list[int], Field(fail_fast=True)]


class CompletionBody(ExtendedBody):
    prompt: (
        str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    ) = Field(description="Text, token ids, or a list of either")
    echo: bool | None = Field(
        None, description="Put the prompt before the answer; with logprobs, those of the prompt as well"
    )
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="Report each token's log probability and so many most likely tokens"
    )

    best_of: int | None = Field(
        None,
        ge=1,
        le=128,
        description="Draw so many answers per prompt, return the `n` most likely; not streamed",
    )


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int
    audio_tokens: int | None = Field(None, description="Speech tokens of a spoken answer")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON text")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """An answer's message.

    `reasoning` equals `reasoning_content`: clients look for either. Absent without reasoning.
    """

    role: Literal["assistant"]
    content: str | None = Field(description="Null when there are only calls, or the answer is spoken")
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    audio: AnswerAudio | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token's log probability. `bytes` are exact where `token` alone is no whole character."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(BaseModel):
    """Log probabilities by token, with those of an echoed prompt, whose first token has none.

    `text_offset` counts characters of the returned text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """A piece of a tool call. `id`, `type` and the name come first, then pieces of the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    audio: AudioDelta | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionAnswer(BaseModel):
    """A completion, or a chunk of one with the new text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = Field(None, description="Of an adapter: the model that it adapts")
    max_model_len: int | None
    task: str = Field(description="generate, or what the model makes of texts: embed, rerank, classify...")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail
