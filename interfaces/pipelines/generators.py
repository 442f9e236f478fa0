"""The older interfaces of a pipeline, one protocol for each task, and the factory of either kind.

`adapters.py` converts between pipelines and generators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from interfaces.base.request_id import RequestID
from interfaces.pipelines.audio import AudioGenerationResponse
from interfaces.pipelines.inputs import TextGenerationInputs
from interfaces.pipelines.pipeline import Pipeline
from interfaces.result.outputs import EmbeddingsOutput, TextGenerationOutput

if TYPE_CHECKING:
    from interfaces.context.protocols import TextGenerationContext

_TokenContextT = TypeVar("_TokenContextT", bound="TextGenerationContext")
_ContextT = TypeVar("_ContextT")


@runtime_checkable
class TokenGenerator(Protocol[_TokenContextT]):
    """Generates tokens for a batch of contexts."""

    def next_token(self, inputs: TextGenerationInputs[_TokenContextT]) -> dict[RequestID, TextGenerationOutput]:
        """Generate `inputs.num_steps` tokens for each request, fewer for those that end before."""
        ...

    def release(self, request_id: RequestID) -> None:
        """Free the state of a finished request."""
        ...


@runtime_checkable
class EmbeddingsGenerator(Protocol[_ContextT]):
    """Embeds a batch of contexts."""

    def encode(self, batch: dict[RequestID, _ContextT]) -> dict[RequestID, EmbeddingsOutput]:
        """Return the embedding of each request. Nothing is kept between calls."""
        ...


@runtime_checkable
class AudioGenerator(Protocol[_ContextT]):
    """Speaks, chunk by chunk."""

    @property
    def decoder_sample_rate(self) -> int:
        """Samples per second of the generated audio."""
        ...

    @property
    def prev_num_steps(self) -> int:
        """Speech tokens that the last call of `next_chunk` generated for each request."""
        ...

    def next_chunk(self, batch: dict[RequestID, _ContextT]) -> dict[RequestID, AudioGenerationResponse]:
        """Return the next chunk of each request."""
        ...

    def release(self, context: _ContextT) -> None:
        """Free the state of a finished context (not of its id, as elsewhere)."""
        ...


# Makes the pipeline; it is called in the process that will run it.
PipelinesFactory = Callable[
    [], Pipeline[Any, Any] | TokenGenerator[Any] | EmbeddingsGenerator[Any] | AudioGenerator[Any]
]
