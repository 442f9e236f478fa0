"""The bodies and answers of the Open Inference Protocol v2, and of its extension that generates.

Types only; `requests.py` checks how fields fit together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Tensors of one request: the prompts, and one for each parameter.
MOST_TENSORS = 64

Stops = str | Annotated[list[str], Field(fail_fast=True, max_length=32)]
FinishReason = Literal["stop", "length"]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Parameters(_Body):
    """Sampling values, by the names that Triton's backends have for them."""

    max_tokens: int | None = Field(None, ge=1, description="Longest answer in tokens; default 16")
    max_new_tokens: int | None = Field(None, ge=1, description="As max_tokens")
    min_tokens: int | None = Field(None, ge=0, description="Least number of tokens")
    temperature: float | None = Field(None, ge=0, description="0 is greedy")
    top_k: int | None = Field(None, description="Draw from this many most likely tokens; 0 or -1 for all")
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, description="Same seed, same answer")
    stop: Stops | None = Field(None, description="Texts that end the answer; they are not part of it")
    stop_words: Stops | None = Field(None, description="As stop")
    ignore_eos: bool | None = None
    random_seed: int | None = Field(None, description="As seed")


class GenerateBody(_Body):
    id: str | None = Field(None, max_length=128, description="Comes back with the answer")
    text_input: str = Field(description="The prompt, as it goes to the model")
    parameters: Parameters | None = None


class GenerateAnswer(BaseModel):
    """An answer, or an event of one with the new text."""

    id: str | None = None
    model_name: str
    model_version: str
    text_output: str
    finish_reason: FinishReason | None = None


class InputTensor(_Body):
    name: str
    datatype: str
    shape: Annotated[list[int], Field(max_length=8)]
    data: Any
    parameters: dict[str, Any] | None = None


class OutputName(_Body):
    name: str
    parameters: dict[str, Any] | None = None


class InferBody(_Body):
    id: str | None = Field(None, max_length=128, description="Comes back with the answer")
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=MOST_TENSORS)] = Field(
        description="text_input (BYTES): one or more prompts. A parameter may be a tensor of one element, too"
    )
    outputs: Annotated[list[OutputName], Field(max_length=MOST_TENSORS)] | None = Field(
        None, description="Wanted outputs; without it text_output"
    )
    parameters: Parameters | None = None


class OutputTensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


class InferAnswer(BaseModel):
    id: str | None = None
    model_name: str
    model_version: str
    outputs: list[OutputTensor]


class TensorFacts(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class ModelFacts(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]


class ServerFacts(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class ErrorAnswer(BaseModel):
    error: str
