"""The outputs of pipelines: tokens, or embeddings. Audio is in `audio.py`, other media in `generation_output.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from numpy.typing import NDArray

from interfaces.base.log_probabilities import LogProbabilities
from interfaces.base.request_id import RequestID
from interfaces.base.status import GenerationStatus
from interfaces.wire.equality import EqualByValue


@dataclass(slots=True)
class TextGenerationOutput:
    """The tokens that were generated for one request since its last output.

    `tokens` include the EOS or stop token that ended it. `log_probabilities` has one entry a token, or is None when
    none were asked for. `num_cached_tokens` counts the prompt tokens that came from the prefix cache.
    """

    request_id: RequestID
    tokens: list[int]
    final_status: GenerationStatus
    log_probabilities: list[LogProbabilities] | None = None
    num_cached_tokens: int | None = None

    @property
    def is_done(self) -> bool:
        return self.final_status.is_done

    @classmethod
    def merge(cls, outputs: Sequence[Self]) -> Self:
        """Merge consecutive outputs of one request. ValueError when there are none, or only some have logprobs."""
        if not outputs:
            raise ValueError("merge needs at least one output")
        lists = [output.log_probabilities for output in outputs if output.log_probabilities is not None]
        # An output without tokens has no logprobs to lack.
        lacking = sum(output.log_probabilities is None and bool(output.tokens) for output in outputs)
        if lists and lacking:
            raise ValueError(f"{lacking} of {len(outputs)} outputs have no log_probabilities: it must be all or none")
        return cls(
            request_id=outputs[0].request_id,
            tokens=[token for output in outputs for token in output.tokens],
            final_status=outputs[-1].final_status,
            log_probabilities=[entry for each in lists for entry in each] if lists else None,
            num_cached_tokens=outputs[0].num_cached_tokens,
        )


@dataclass(eq=False)
class EmbeddingsGenerationOutput(EqualByValue):
    """The embedding of one request: floating-point numbers."""

    __tagged__: ClassVar[bool] = True

    embeddings: NDArray[Any]

    @property
    def is_done(self) -> bool:
        """Always True: an embedding takes one step."""
        return True


EmbeddingsOutput = EmbeddingsGenerationOutput
