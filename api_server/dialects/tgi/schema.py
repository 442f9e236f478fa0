"""The bodies of the TGI dialect, with its published names, and with the values that its router accepts.

Types and machine ranges only (what a JSON reader refuses); the rules between values live in `validation.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

UInt32 = Annotated[int, Field(ge=0, lt=1 << 32)]
UInt64 = Annotated[int, Field(ge=0, le=(1 << 64) - 1)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Body(BaseModel):
    """A body. Unknown keys are ignored, because Hugging Face clients send more than any one server knows."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class GenerateParameters(Body):
    """Parameters.

    `max_new_tokens` defaults to 100; an explicit null is the rest of the model's limit after the prompt.
    """

    adapter_id: str | None = Field(None, description="LoRA adapter to use")
    best_of: UInt32 | None = Field(None, description="Sequences to draw, of which the most likely is returned")
    decoder_input_details: bool | None = Field(
        None, description="Return the prompt's tokens with logprobs; implies `details`"
    )
    details: bool | None = Field(None, description="Return the generated tokens, the finish reason and the seed")
    do_sample: bool | None = Field(None, description="Draw tokens at random; otherwise take the most likely one")
    frequency_penalty: float | None = Field(
        None, description="Lowers the score of tokens by how often they occur, from -2 to 2"
    )
    grammar: Any = Field(None, description="Constrain the output to a JSON schema or a regular expression")
    max_new_tokens: UInt32 | None = Field(100, description="Longest answer in tokens")
    repetition_penalty: float | None = Field(None, description="Above 1 penalises tokens that already occurred")
    return_full_text: bool | None = Field(None, description="Put the prompt before the generated text")
    seed: UInt64 | None = Field(None, description="Seed of the random draws; the same seed gives the same text")
    stop: Annotated[list[str], Field(fail_fast=True)] | str | None = Field(
        None, description="Texts that end the answer; they stay in it"
    )
    temperature: float | None = Field(None, description="Above 1 flattens the distribution, below 1 sharpens it")
    top_k: Int32 | None = Field(None, description="Draw from this many most likely tokens only")
    top_n_tokens: UInt32 | None = Field(None, description="Alternatives to report at each position")
    top_p: float | None = Field(None, description="Draw from the smallest set of tokens that has this probability")
    truncate: UInt64 | None = Field(None, description="Keep only this many last tokens of the prompt")
    typical_p: float | None = Field(None, description="Typical decoding mass")
    watermark: bool | None = Field(None, description="Watermark the answer")

    @property
    def wants_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


# A request without `parameters` samples; one whose `parameters` have no sampling value is greedy.
WHEN_ABSENT = GenerateParameters(do_sample=True)


class GenerateRequest(Body):
    inputs: str = Field(description="The prompt", examples=["My name is Olivier and I"])
    parameters: GenerateParameters | None = None

    @cached_property
    def effective(self) -> GenerateParameters:
        return WHEN_ABSENT if self.parameters is None else self.parameters


class CompatGenerateRequest(GenerateRequest):
    """The body of `POST /`: a generate request with a switch between whole answers and streams.

    The prompt is returned unless `return_full_text` is false, as with the hosted text-generation pipelines that this
    route stands for.
    """

    stream: bool | None = None

    @cached_property
    def effective(self) -> GenerateParameters:
        given = super().effective
        return given if given.return_full_text is not None else given.model_copy(update={"return_full_text": True})


class Token(BaseModel):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(BaseModel):
    id: int
    text: str
    logprob: float | None


class Details(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = Field(description="The seed that was used; null when the answer was greedy")
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = Field(
        None, description="The most likely tokens at each place, when `top_n_tokens` asks for them"
    )


class BestOfSequence(Details):
    generated_text: str


class DetailsOfAll(Details):
    best_of_sequences: list[BestOfSequence] | None = Field(
        None, description="The answers that were less likely, when `best_of` is above 1"
    )


class GenerateResponse(BaseModel):
    generated_text: str
    details: DetailsOfAll | None = Field(None, description="Only when the request asks for it")


class StreamDetails(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None


class StreamResponse(BaseModel):
    """One server-sent event. The last one of a stream carries `generated_text`."""

    index: int
    token: Token
    top_tokens: list[Token] | None = Field(None, description="Only when `top_n_tokens` asks for them")
    generated_text: str | None
    details: StreamDetails | None


class ErrorResponse(BaseModel):
    error: str
    error_type: str


class SimpleToken(BaseModel):
    id: int
    text: str
    start: int
    stop: int


class TokenizeRequest(Body):
    inputs: str = Field(examples=["My name is Olivier and I"])
    parameters: GenerateParameters | None = Field(None, description="Only `truncate` counts")


class Info(BaseModel):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
