"""What runs a batch: a pipeline from inputs to one output a request, and the tokenizer that makes its contexts.

Knows neither models nor devices; `model_worker/pipelines/` implements it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from interfaces.base.request_id import RequestID, RequestType
from interfaces.result.results import PipelineOutput as PipelineOutput
from interfaces.result.results import PipelineOutputType as PipelineOutputType

TokenizerEncoded = TypeVar("TokenizerEncoded")
"""What a tokenizer makes of a text: an array of token ids, usually."""

UnboundContextType = TypeVar("UnboundContextType", covariant=True)
"""What a tokenizer makes of a request."""


class PipelineInputs:
    """Base of what a pipeline executes."""


PipelineInputsType = TypeVar("PipelineInputsType", bound=PipelineInputs)

PipelineOutputsDict = dict[RequestID, PipelineOutputType]
"""Outputs by request."""


class Pipeline(ABC, Generic[PipelineInputsType, PipelineOutputType]):
    """Runs batches and keeps, between calls, what its requests need (K/V, rows) until they are released."""

    @abstractmethod
    def execute(self, inputs: PipelineInputsType) -> PipelineOutputsDict[PipelineOutputType]:
        """One output for each request of the batch."""

    @abstractmethod
    def release(self, request_id: RequestID) -> None:
        """Frees what is kept for a request; to be called once for each that finished, failed or was cancelled."""


@runtime_checkable
class PipelineTokenizer(Protocol[UnboundContextType, TokenizerEncoded, RequestType]):
    """Text to tokens and back, and requests to contexts."""

    @property
    def eos(self) -> int:
        """The token that ends a sequence."""
        ...

    @property
    def expects_content_wrapping(self) -> bool:
        """Whether the chat template wants text parts as `{"type": "text", "content": ...}` instead of `"text"`.

        Image parts become `{"type": "image"}` either way; their bytes are in the request.
        """
        ...

    async def new_context(self, request: RequestType) -> UnboundContextType:
        """The state of a request before its first step. ValueError names what is wrong with the request."""
        ...

    async def encode(self, prompt: str, add_special_tokens: bool) -> TokenizerEncoded:
        """Tokens of a text. ValueError when they are more than the model can take."""
        ...

    async def decode(self, encoded: TokenizerEncoded, **kwargs: Any) -> str:
        """The text of tokens."""
        ...
