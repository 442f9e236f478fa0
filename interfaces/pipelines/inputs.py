"""The inputs of pipelines: batches of contexts, by task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from interfaces.base.request_id import RequestID
from interfaces.base.status import BatchType
from interfaces.pipelines.pipeline import PipelineInputs

if TYPE_CHECKING:
    from interfaces.context.protocols import EmbeddingsContext, TextGenerationContext

_ContextT = TypeVar("_ContextT")
_TextT = TypeVar("_TextT", bound="TextGenerationContext")


@dataclass(init=False)
class TextGenerationInputs(PipelineInputs, Generic[_TextT]):
    """Contexts, and how many tokens to generate for each of them.

    Given as `batches`, one list for each data-parallel replica, or as one `batch`: a map from request id to context.
    The other fields are derived: `input_tokens` will be computed by the next forward, `context_tokens` have been
    before, and `batch_type` is CE while any context has generated nothing yet.
    """

    batches: list[list[_TextT]]
    num_steps: int
    input_tokens: int
    context_tokens: int
    batch_type: BatchType

    def __init__(
        self,
        batches: Sequence[Sequence[_TextT]] | Mapping[Any, _TextT] | None = None,
        num_steps: int = 1,
        *,
        batch: Mapping[Any, _TextT] | None = None,
    ) -> None:
        if (batches is None) == (batch is None):
            raise ValueError("exactly one of batches and batch must be given")
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        given = batches if batch is None else batch
        if isinstance(given, Mapping):
            self.batches = [list(given.values())]
        else:
            self.batches = [list(replica) for replica in given or ()]
        self.num_steps = num_steps
        contexts = self.flat_batch
        _refuse_twins(context.request_id for context in contexts)
        self.input_tokens = sum(context.tokens.active_length for context in contexts)
        self.context_tokens = sum(context.tokens.processed_length for context in contexts)
        fresh = any(context.tokens.generated_length == 0 for context in contexts)
        self.batch_type = BatchType.CE if fresh else BatchType.TG

    def __bool__(self) -> bool:
        return any(self.batches)

    @property
    def batch(self) -> dict[RequestID, _TextT]:
        """All contexts by request id, replica after replica."""
        return {context.request_id: context for context in self.flat_batch}

    @property
    def flat_batch(self) -> list[_TextT]:
        return [context for replica in self.batches for context in replica]

    @property
    def batch_size(self) -> int:
        return sum(map(len, self.batches))

    @property
    def enable_log_probs(self) -> bool:
        return any(self.batch_top_log_probs)

    @property
    def enable_echo(self) -> bool:
        return any(self.batch_echo)

    @property
    def batch_top_log_probs(self) -> list[int]:
        return [context.log_probabilities for context in self.flat_batch]

    @property
    def batch_echo(self) -> list[bool]:
        return [context.log_probabilities_echo for context in self.flat_batch]


@dataclass(frozen=True)
class EmbeddingsGenerationInputs(PipelineInputs):
    """Contexts to embed, one map for each data-parallel replica."""

    batches: list[dict[RequestID, EmbeddingsContext]]

    @property
    def batch(self) -> dict[RequestID, EmbeddingsContext]:
        """All contexts by request id, replica after replica."""
        return {name: context for replica in self.batches for name, context in replica.items()}


@dataclass(frozen=True)
class AudioGenerationInputs(PipelineInputs, Generic[_ContextT]):
    """Contexts whose next chunk of audio is wanted."""

    batch: dict[RequestID, _ContextT]


@dataclass(frozen=True)
class PixelGenerationInputs(PipelineInputs, Generic[_ContextT]):
    """Contexts to make images for."""

    batch: dict[RequestID, _ContextT]


def _refuse_twins(request_ids: Iterable[Any]) -> None:
    seen: set[Any] = set()
    for request_id in request_ids:
        if request_id in seen:
            raise ValueError(f"request_id {str(request_id)!r} is in the batch twice")
        seen.add(request_id)
