"""The context of a one-shot request: texts whose values take one forward pass, without KV cache, rows or sampling.

The values of a text depend on its tokens and on the options alone, so a lost text is simply computed again. Knows token
ids and options; knows neither models nor text.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from interfaces.base.request_id import RequestID
from interfaces.wire.codec import I8, I32
from interfaces.wire.equality import EqualByValue
from interfaces.wire.shared_memory import Segments


class PoolingTask(enum.StrEnum):
    """What is made of each text.

    EMBED: one vector. EMBED_TOKENS: one vector for each token. SPARSE: pairs (token id, weight). CLASSIFY: one number
    for each label. CLASSIFY_TOKENS: one number for each label and token. SPEAK: its sound, one number for each sample
    (`SynthesisContext`). PAINT: an image, one row of numbers for each line of pixels (`PaintingContext`).
    DECODE_SPEECH: the sound of speech tokens, one number for each sample (`CodecContext`). ENCODE_SPEECH: the codes of
    a clip of speech (`ClipContext`).
    """

    EMBED = "embed"
    EMBED_TOKENS = "embed_tokens"
    SPARSE = "sparse"
    CLASSIFY = "classify"
    CLASSIFY_TOKENS = "classify_tokens"
    SPEAK = "speak"
    PAINT = "paint"
    DECODE_SPEECH = "decode_speech"
    ENCODE_SPEECH = "encode_speech"


class TokenMark(enum.IntEnum):
    """Token types that say what else a token is.

    UNCOUNTED: pooling leaves it out, as one of a prompt. UNSEEN: it is behind the text, and no token sees it, as a
    query's expansion. SKIPPED: its vector is left out of those of each token.
    """

    UNCOUNTED = -1
    UNSEEN = -2
    SKIPPED = -3


@dataclass(kw_only=True, eq=False)
class PoolingContext(EqualByValue):
    """The texts of one request, and what to make of each.

    `tokens` are those of all texts, one text after another, and `lengths` the number of tokens of each. `token_types`
    tell the two halves of a pair apart, for models that want it; a negative one is a TokenMark. `dimensions`: a vector
    is cut to so many numbers.
    `normalize`: vectors get the length 1, after the cut. `activate`: labels get probabilities instead of logits.
    `route`: the kind of the texts ("query"), where a model has modules for each kind; empty for the usual ones.
    `adapter` and `adapter_digest` are the name and the content of a LoRA adapter, empty for the model itself;
    `adapter_handle` is what workers call it, which the scheduler fills in.
    ValueError when the values contradict each other, also after a journey over the wire.
    """

    wire_tag: ClassVar[str] = "pooling"
    # What one of them is called in logs.
    noun: ClassVar[str] = "text"
    # The most that a batch may cost before it has more time than others, where no batch was computed before it.
    usual_cost: ClassVar[float] = math.inf

    tokens: I32
    lengths: I32
    task: PoolingTask
    token_types: I8 | None = None
    dimensions: int | None = None
    normalize: bool = True
    activate: bool = True
    request_id: RequestID = field(default_factory=RequestID)
    model_name: str = ""
    route: str = ""
    adapter: str = ""
    adapter_digest: str = ""
    adapter_handle: int = 0

    def __post_init__(self) -> None:
        self.task = PoolingTask(self.task)
        if type(self.request_id) is not RequestID:
            self.request_id = RequestID(self.request_id)
        for name, dtype in (("tokens", np.int32), ("lengths", np.int32), ("token_types", np.int8)):
            _check_column(name, getattr(self, name), dtype)
        if not len(self.lengths):
            raise ValueError("lengths must have at least one text, got none")
        if self.lengths.min() < 1:
            raise ValueError(f"lengths must be at least 1, got {int(self.lengths.min())}: leave empty texts out")
        total = int(self.lengths.sum(dtype=np.int64))
        if total != len(self.tokens):
            raise ValueError(f"lengths must add up to the {len(self.tokens)} tokens, got {total}")
        if self.tokens.min() < 0:
            raise ValueError(f"tokens must be token ids of at least 0, got {int(self.tokens.min())}")
        if self.token_types is not None and len(self.token_types) != len(self.tokens):
            raise ValueError(
                f"token_types must have one type for each of the {len(self.tokens)} tokens, got {len(self.token_types)}"
            )
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions}")

    @classmethod
    def of(cls, texts: Sequence[NDArray[np.integer] | Sequence[int]], task: PoolingTask, **options: object) -> Self:
        """Make a context of token ids, one sequence for each text."""
        lengths = np.array([len(text) for text in texts], np.int32)
        tokens = np.concatenate([np.asarray(text, np.int32) for text in texts] or [np.empty(0, np.int32)])
        return cls(tokens=tokens, lengths=lengths, task=task, **options)  # type: ignore[arg-type]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.request_id)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """The place of each text's first token, and the number of all tokens: i64[texts + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def options(self) -> tuple[object, ...]:
        """Everything but the texts. Texts of contexts with equal options may be computed together."""
        has_types = self.token_types is not None
        return self.task, self.dimensions, self.normalize, self.activate, self.route, has_types, self.adapter_handle

    @property
    def costs(self) -> NDArray[np.int64]:
        """What the texts before each text weigh in limits and fair shares, and what all do: their tokens,
        i64[texts + 1]."""
        return self.offsets

    @property
    def token_cost(self) -> float:
        """The computation of a token, beside that of a usual one of its task."""
        return 1.0

    def share_arrays(self, segments: Segments) -> None:
        """Put large arrays into shared memory, until `unshare_arrays`. The token ids of thousands of texts fit a
        message, so only classes with other arrays have any."""

    def unshare_arrays(self, segments: Segments) -> None:
        """Make the arrays this process's own again."""

    def texts(self) -> list[NDArray[np.int32]]:
        """Return the token ids of each text: views."""
        return np.split(self.tokens, self.offsets[1:-1])

    def part(self, first: int, end: int) -> Self:
        """Return a context of the texts from `first` up to and without `end`: views of these."""
        offsets = self.offsets
        inside = slice(int(offsets[first]), int(offsets[end]))
        types = None if self.token_types is None else self.token_types[inside]
        return replace(
            self,
            tokens=self.tokens[inside],
            lengths=self.lengths[first:end],
            token_types=types,
            **self._further_columns(slice(first, end)),
        )

    def select(self, indices: NDArray[np.integer]) -> Self:
        """Return a context of the texts at `indices`, which ascend."""
        chosen = np.zeros(len(self), bool)
        chosen[indices] = True
        inside = np.repeat(chosen, self.lengths)
        types = None if self.token_types is None else self.token_types[inside]
        return replace(
            self,
            tokens=self.tokens[inside],
            lengths=self.lengths[chosen],
            token_types=types,
            **self._further_columns(chosen),
        )

    @classmethod
    def joined(cls, contexts: Sequence[Self]) -> Self:
        """Join the texts of contexts that have the same options. The name is that of the first."""
        first = contexts[0]
        if len(contexts) == 1:
            return first
        types = [context.token_types for context in contexts if context.token_types is not None]
        return replace(
            first,
            tokens=np.concatenate([context.tokens for context in contexts]),
            lengths=np.concatenate([context.lengths for context in contexts]),
            token_types=np.concatenate(types) if types else None,
            **cls._joined_columns(contexts),
        )

    def _further_columns(self, chosen: slice | NDArray[np.bool_]) -> dict[str, Any]:
        """Return the chosen entries of the columns of a class that has more of them."""
        return {}

    @classmethod
    def _joined_columns(cls, contexts: Sequence[Self]) -> dict[str, Any]:
        """Return the joined columns of a class that has more of them."""
        return {}


def _check_column(name: str, array: object, dtype: type[np.generic]) -> None:
    if array is None and name == "token_types":
        return
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{name} must be a one-dimensional array of {dtype.__name__}, got {array!r:.80}")
