"""The bodies of TEI's routes, with its published names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# One text as characters or ids, or a list of these.
Inputs = str | TokenIds | Annotated[list[str | TokenIds], Field(fail_fast=True)]


class Body(BaseModel):
    """Unknown keys are ignored, because Hugging Face clients send more than any one server knows."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Truncation(Body):
    truncate: bool | None = Field(None, description="Cut texts to what the model takes; without it, long texts fail")
    truncation_direction: Literal["Left", "Right", "left", "right"] = Field("Right", description="The side that is cut")

    @property
    def keeps_end(self) -> bool:
        return self.truncation_direction in ("Left", "left")


class InputsBody(Truncation):
    inputs: Inputs = Field(description="A text, its token ids, or a list of either")
    prompt_name: str | None = Field(None, description="A prompt of the checkpoint to put before texts")


class EmbedBody(InputsBody):
    normalize: bool | None = Field(True, description="Give vectors the length 1")
    dimensions: int | None = Field(None, ge=1, description="Cut vectors to so many numbers, before that")


class RerankBody(Truncation):
    query: str = Field(min_length=1)
    texts: Texts
    raw_scores: bool | None = Field(False, description="Logits instead of values between 0 and 1")
    return_text: bool | None = False


class PredictBody(Truncation):
    inputs: str | Texts | Annotated[list[Texts], Field(fail_fast=True)] = Field(
        description="A text; a list of one text or of a pair of texts; or a list of such lists"
    )
    raw_scores: bool | None = Field(False, description="Logits instead of probabilities")


class SimilarityInput(Body):
    source_sentence: str = Field(min_length=1)
    sentences: Texts


class SimilarityParameters(Truncation):
    prompt_name: str | None = None


class SimilarityBody(Body):
    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class EmbedAnswer(RootModel[list[list[float]]]):
    """One vector for each text."""


class EmbedAllAnswer(RootModel[list[list[list[float]]]]):
    """One vector for each token of each text."""


class SparseValue(BaseModel):
    index: int
    value: float


class EmbedSparseAnswer(RootModel[list[list[SparseValue]]]):
    """The values of each text that are not zero."""


class Rank(BaseModel):
    index: int
    score: float
    text: str | None = Field(None, description="Only when `return_text` asks for it")


class Prediction(BaseModel):
    label: str
    score: float


class PredictAnswer(RootModel[list[Prediction] | list[list[Prediction]]]):
    """All labels, the most likely first; lists of these for a list of inputs."""


class SimilarityAnswer(RootModel[list[float]]):
    """One cosine for each sentence."""


class Info(BaseModel):
    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int | None = Field(description="As the workers have it; null before one has said it")
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


class ErrorResponse(BaseModel):
    error: str
    error_type: str
