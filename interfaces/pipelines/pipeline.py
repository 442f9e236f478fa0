"""The runner of a batch: a pipeline from inputs to one output a request, and the tokenizer that makes its contexts.

Knows neither models nor devices; `model_worker/pipelines/` implements it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from interfaces.base.request_id import RequestID, RequestType
from interfaces.result.results import PipelineOutput as PipelineOutput
from interfaces.result.results import PipelineOutputType as PipelineOutputType

# The encoded form of a text: an array of token ids, usually.
TokenizerEncoded = TypeVar("TokenizerEncoded")

# The context that a tokenizer makes of a request.
UnboundContextType = TypeVar("UnboundContextType", covariant=True)


class PipelineInputs:
    """Base of the inputs of pipelines."""


PipelineInputsType = TypeVar("PipelineInputsType", bound=PipelineInputs)

# Outputs by request.
PipelineOutputsDict = dict[RequestID, PipelineOutputType]


class Pipeline(ABC, Generic[PipelineInputsType, PipelineOutputType]):
    """Runs batches and keeps, between calls, the state of its requests (K/V, rows) until they are released."""

    @abstractmethod
    def execute(self, inputs: PipelineInputsType) -> PipelineOutputsDict[PipelineOutputType]:
        """Return one output for each request of the batch."""

    @abstractmethod
    def release(self, request_id: RequestID) -> None:
        """Free the state of a request; call it once for each that finished, failed or was cancelled."""


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
        """Make the state of a request before its first step. ValueError names what is wrong with the request."""
        ...

    async def encode(self, prompt: str, add_special_tokens: bool) -> TokenizerEncoded:
        """Encode a text. ValueError when its tokens are more than the model can take."""
        ...

    async def decode(self, encoded: TokenizerEncoded, **kwargs: Any) -> str:
        """Decode tokens to a text."""
        ...
