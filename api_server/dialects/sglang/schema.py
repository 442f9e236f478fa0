"""The bodies of SGLang's native dialect: requests, singly or as a batch, and answers.

Types only; the rules between values live in `validation.py`, the batch forms in `batch.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api_server.body.item_limits import Biases, StopIds

# A long list of wrong values would otherwise make one error each.
Integers = Annotated[list[int], Field(fail_fast=True)]
Vectors = Annotated[list[Annotated[list[float], Field(fail_fast=True)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class SamplingParameters(BaseModel):
    """Sampling values. An unknown key is refused, because a misspelt value would silently change every answer.

    Null is the default of each, except for `max_new_tokens`, where it means "as far as the context allows".
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    max_new_tokens: int | None = Field(128, description="Longest answer in tokens; null fills the context")
    min_new_tokens: int | None = Field(None, description="No end-of-sequence before this many tokens")
    temperature: float | None = Field(None, description="0 is greedy; default 1")
    top_p: float | None = Field(None, description="Nucleus sampling, above 0 up to 1")
    top_k: int | None = Field(None, description="-1 or at least 1")
    min_p: float | None = Field(None, description="Keep tokens with at least this share of the best one's probability")
    frequency_penalty: float | None = Field(None, description="-2 to 2, over the output")
    presence_penalty: float | None = Field(None, description="-2 to 2, over the output")
    repetition_penalty: float | None = Field(None, description="Above 0 up to 2, over the output")
    stop: str | Texts | None = Field(None, description="Texts that end the answer; cut from it")
    stop_token_ids: StopIds | None = Field(None, description="Token ids that end the answer")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; default true")
    spaces_between_special_tokens: bool | None = Field(
        None, description="Without effect: fast tokenizers never add such spaces"
    )
    no_stop_trim: bool | None = Field(None, description="Keep the stop text in the answer")
    n: int | None = Field(None, description="Answers to draw per prompt")
    logit_bias: Biases | None = Field(None, description="Token id to a number added to its score")
    sampling_seed: int | None = Field(None, description="Seed of the random draws")
    stop_regex: str | Texts | None = Field(
        None, description="Patterns in RE2's syntax that end the answer when they match in it; what matched stays"
    )
    json_schema: str | dict[str, Any] | None = Field(
        None, description="A JSON schema, as text or object, that the answer is valid against"
    )
    regex: str | None = Field(None, description="A pattern that the whole answer matches")
    ebnf: str | None = Field(None, description="A grammar in EBNF (`root ::= ...`) that the answer follows")
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="Free text with constrained parts: structures and triggers, or a format"
    )
    custom_params: dict[str, Any] | None = Field(None, description="What the custom logit processor is given")
    stream_interval: int | None = Field(None, description="Tokens per event after the first, at least; default 1")
    beam_width: int | None = Field(None, description="Not built yet")
    watermark: Any = Field(None, description="Not built yet")
    choice: list[str] | None = Field(None, description="Not built yet")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def stop_patterns(self) -> list[str]:
        return [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex or []


class SessionParameters(BaseModel):
    """A place in a session.

    The new input follows prompt and answer of the request `rid`, or begins anew without one.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: str = Field(max_length=256, description="The session")
    rid: str | None = Field(None, max_length=256, description="The request to go on from; it must have ended")
    offset: int | None = Field(None, ge=0, description="Keep only so many tokens of it; 0: all")
    replace: bool | None = Field(None, description="Forget what went on from that request before; without one: all")
    drop_previous_output: bool | None = Field(None, description="Keep its prompt only")


class GenerateRequest(BaseModel):
    """A request with exactly one of `text`, `input_ids` and `input_embeds`; a list of them is a batch.

    Other values are given once for all or as a list with one entry per prompt. Unknown keys are ignored.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    text: str | Texts | None = Field(None, examples=["The capital of France is"])
    input_ids: Integers | Annotated[list[Integers], Field(fail_fast=True)] | None = None
    input_embeds: Vectors | Annotated[list[Vectors], Field(fail_fast=True)] | None = Field(
        None, description="Instead of tokens: a vector for each, as wide as the model's embeddings"
    )
    sampling_params: SamplingParameters | Annotated[list[SamplingParameters], Field(fail_fast=True)] | None = None
    rid: str | Texts | None = Field(None, description="Name of the request; default: a new one")
    stream: bool | None = Field(None, description="Answer as server-sent events with cumulative text")
    return_logprob: bool | list[bool] | None = Field(None, description="Return the generated tokens' logprobs")
    logprob_start_len: int | list[int] | None = Field(
        None, description="Return the logprobs of the prompt, too, from this position on; -1: generated tokens only"
    )
    top_logprobs_num: int | list[int] | None = Field(None, description="Report so many most likely tokens, up to 64")
    token_ids_logprob: Integers | Annotated[list[Integers | None], Field(fail_fast=True)] | None = Field(
        None, description="Report the logprobs of these tokens at each position; one list for all prompts or one each"
    )
    return_text_in_logprobs: bool | None = Field(None, description="Third element of each entry: the token's text")
    return_prompt_token_ids: bool | None = None
    return_hidden_states: bool | list[bool] | None = Field(
        None, description="Return the hidden states of all tokens; the server must be started with --hidden-states"
    )
    cache_salt: str | list[str | None] | None = Field(
        None, description="Prompts share cached prefixes only with prompts of the same salt"
    )
    extra_key: str | list[str | None] | None = Field(None, description="As cache_salt; both count")
    image_data: Any = Field(
        None,
        description="Images of the prompt, which has a placeholder for each: a URL, a data URI, base64, or an object "
        "with url and detail; a list of them. With a list of prompts: one for all, a list with one each, or a list of "
        "lists",
    )
    video_data: Any = Field(
        None,
        description="Videos of the prompt, in the forms of image_data: a URL, a data URI, base64, or an object with "
        "url (or frames, a list of images) and fps or num_frames",
    )
    audio_data: Any = Field(
        None,
        description="Sounds of the prompt, in the forms of image_data: a URL, a data URI, base64, or an object "
        "with url",
    )
    lora_path: str | list[str | None] | None = Field(
        None, description="Name of a loaded adapter; in a list null is the model itself"
    )
    custom_logit_processor: str | list[str | None] | None = Field(
        None, description="Name of a logits processor that the server was started with (--logit-processors)"
    )
    session_params: SessionParameters | None = Field(None, description="Go on from an earlier request of a session")
    session_id: str | None = Field(None, description="Without effect: a name for requests that belong together")
    return_sampling_mask: bool | None = Field(None, description="Not built yet")
    return_flat_raw_top_logprobs: bool | None = Field(None, description="Not built yet")
    return_flat_raw_output_top_logprobs: bool | None = Field(None, description="Not built yet")
    return_routed_experts: bool | None = Field(None, description="Not built yet")
    return_indexer_topk: bool | None = Field(None, description="Not built yet")
    return_entropy: bool | None = Field(None, description="Not built yet")
    max_thinking_tokens: int | None = Field(
        None,
        ge=0,
        description="Reasoning that has become so long is ended, by the marks of the model's reasoning parser",
    )


Logprob = tuple[float | None, int, str | None]


class MatchedStop(BaseModel):
    type: Literal["stop"]
    matched: int | str


class LengthReached(BaseModel):
    type: Literal["length"]
    length: int


class Aborted(BaseModel):
    type: Literal["abort"]
    message: str
    status_code: int | None
    err_type: str | None


class WeightVersion(BaseModel):
    """A version of the weights, and the first token of an answer that it made."""

    first_token: int
    weight_version: str


class MetaInfo(BaseModel):
    """Facts of an answer. Logprob keys need `return_logprob`; an entry is [logprob, token id, text or null]."""

    id: str
    finish_reason: MatchedStop | LengthReached | Aborted | None
    prompt_tokens: int | None = Field(None, description="Not in the answer to a request aborted while it waited")
    completion_tokens: int
    cached_tokens: int | None = Field(None, description="As prompt_tokens")
    reasoning_tokens: int | None = Field(None, description="As prompt_tokens; counted with max_thinking_tokens, else 0")
    weight_version: str
    weight_versions: list[WeightVersion] | None = Field(None, description="Where it changed: each with its first token")
    e2e_latency: float | None = Field(None, description="Seconds; in the last frame only")
    spec_verify_ct: int | None = Field(None, description="Passes; this and the next ones where tokens were guessed")
    spec_accept_length: float | None = Field(None, description="Tokens of a pass")
    spec_accept_rate: float | None = Field(None, description="Share of guesses that were right")
    spec_num_correct_drafts: int | None = Field(None, description="Guesses that were right")
    spec_num_proposed_drafts: int | None = Field(None, description="Guesses that were computed")
    input_token_logprobs: list[Logprob] | None = None
    output_token_logprobs: list[Logprob] | None = None
    output_token_logprobs_length: int | None = None
    input_top_logprobs: list[list[Logprob] | None] | None = None
    output_top_logprobs: list[list[Logprob] | None] | None = None
    input_token_ids_logprobs: list[list[Logprob] | None] | None = None
    output_token_ids_logprobs: list[list[Logprob] | None] | None = None
    hidden_states: list[list[list[float]] | list[float]] | None = Field(
        None, description="Of the prompt's tokens, as one matrix; then of each generated token but the last, a vector"
    )


class GenerateResponse(BaseModel):
    """An answer. `text` is the generated part only; a batch answers a list of these, in the prompts' order."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | None = None
    index: int | None = Field(None, description="Place in the batch, in streams of a batch")


class ErrorDetail(BaseModel):
    message: str
    type: str
    code: int


class ErrorResponse(BaseModel):
    error: ErrorDetail
