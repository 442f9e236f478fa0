"""The older, index-based interface of a text context: the same token buffer, seen through three indices.

Knows no state of its own: every index is computed from the buffer, and the values that only this interface has (cache
slot, committed index, draft offset) live in the context and travel with it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from interfaces.base.log_probabilities import LogProbabilities
from interfaces.base.request_id import RequestID
from interfaces.base.status import GenerationStatus
from interfaces.context.stopping import EOSTracker
from interfaces.context.tokens import TokenBuffer, TokenSlice


@dataclass(slots=True)
class IndexState:
    """The values that only the index interface needs."""

    cache_seq_id: int | None = None
    committed_idx: int = 0
    draft_offset: int = 0


class Indexed(Protocol):
    """The members of a text context that the index interface reads."""

    tokens: TokenBuffer
    request_id: RequestID
    eos_tracker: EOSTracker
    index_state: IndexState
    status: GenerationStatus

    def append_forced_token(self, token: int) -> None: ...

    def drop_last_tokens(self, n: int) -> None: ...

    def take_outstanding(self) -> list[tuple[int, LogProbabilities | None]]: ...


class NotAssignedError(ValueError, AttributeError):
    """The context has no cache slot. An AttributeError too, so that `isinstance` with a protocol can look at it."""


class IndexFace:
    """Members of `InputContext` that are not those of `TextGenerationContext`."""

    @property
    @abstractmethod
    def _context(self) -> Indexed: ...

    @property
    def start_idx(self) -> int:
        return self._context.tokens.processed_length

    @property
    def active_idx(self) -> int:
        return self._context.tokens.current_position

    @property
    def end_idx(self) -> int:
        return len(self._context.tokens)

    @property
    def committed_idx(self) -> int:
        """The committed index. Informational: stored, and given back."""
        return self._context.index_state.committed_idx

    @property
    def active_length(self) -> int:
        return self._context.tokens.active_length

    @property
    def current_length(self) -> int:
        return len(self._context.tokens)

    @property
    def all_tokens(self) -> TokenSlice:
        return self._context.tokens.all

    @property
    def prompt_tokens(self) -> TokenSlice:
        return self._context.tokens.prompt

    @property
    def generated_tokens(self) -> TokenSlice:
        return self._context.tokens.generated

    @property
    def next_tokens(self) -> TokenSlice:
        return self._context.tokens.active

    @property
    def eos_token_ids(self) -> set[int]:
        return self._context.eos_tracker.eos_token_ids

    @property
    def is_ce(self) -> bool:
        """Whether there is more than one token to process. A one-token prompt is no CE in this sense; see
        `BatchType`."""
        return self._context.tokens.active_length > 1

    @property
    def is_assigned_to_cache(self) -> bool:
        return self._context.index_state.cache_seq_id is not None

    @property
    def cache_seq_id(self) -> int:
        slot = self._context.index_state.cache_seq_id
        if slot is None:
            raise NotAssignedError(f"request {self._context.request_id} has no cache slot: call assign_to_cache first")
        return slot

    def assign_to_cache(self, cache_seq_id: int) -> None:
        if self.is_assigned_to_cache:
            raise ValueError(f"request {self._context.request_id} has cache slot {self.cache_seq_id} already")
        self._context.index_state.cache_seq_id = cache_seq_id

    def unassign_from_cache(self) -> None:
        """Give the cache slot back. Idempotent."""
        self._context.index_state.cache_seq_id = None

    def set_draft_offset(self, idx: int) -> None:
        """Store the draft offset in `index_state.draft_offset`. Informational."""
        self._context.index_state.draft_offset = idx

    def bump_token_indices(
        self, start_idx: int = 0, active_idx: int = 0, end_idx: int = 0, committed_idx: int = 0
    ) -> None:
        """Move the indices by these distances."""
        self.set_token_indices(
            self.start_idx + start_idx,
            self.active_idx + active_idx,
            self.end_idx + end_idx,
            self.committed_idx + committed_idx,
        )

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
        committed_idx: int | None = None,
    ) -> None:
        """Move the indices; None leaves one. An end beyond the tokens takes in the zeros that pad them."""
        buffer = self._context.tokens
        start = self.start_idx if start_idx is None else start_idx
        active = self.active_idx if active_idx is None else active_idx
        end = self.end_idx if end_idx is None else end_idx
        if (start, active, end) != (self.start_idx, self.active_idx, self.end_idx):
            if not 0 <= start < active <= end <= len(buffer.padded):
                raise ValueError(
                    f"the indices need 0 <= start_idx < active_idx <= end_idx <= {len(buffer.padded)}, "
                    f"got start_idx={start}, active_idx={active}, end_idx={end}"
                )
            buffer.set_window(start, active, end)
        if committed_idx is not None:
            self._context.index_state.committed_idx = committed_idx

    def jump_ahead(self, new_token: int) -> None:
        """Append a forced token: it is delivered, but still has to be processed with the active ones."""
        self._context.append_forced_token(new_token)

    def rollback(self, idx: int) -> None:
        """Forget the last `idx` generated tokens; they count as never delivered, and the request runs again."""
        self._context.drop_last_tokens(idx)

    def outstanding_completion_tokens(self) -> list[tuple[int, LogProbabilities | None]]:
        """Return undelivered tokens with their log probabilities, each once; the token that ended the text is
        withheld."""
        context = self._context
        last = len(context.tokens) - 1
        first = context.tokens.delivered_length
        withheld = last if context.status is GenerationStatus.END_OF_SEQUENCE else None
        pairs = context.take_outstanding()
        return [pair for i, pair in enumerate(pairs, first) if i != withheld]

    def update_status(self, status: GenerationStatus) -> None:
        self._context.status = status


class TextInputContext(IndexFace):
    """An `InputContext`: a text context whose `tokens` are the padded array. All other members are the context's."""

    def __init__(self, context: Indexed) -> None:
        object.__setattr__(self, "_wrapped", context)

    @property
    def _context(self) -> Indexed:
        wrapped: Indexed = self.__dict__["_wrapped"]
        return wrapped

    @property
    def tokens(self) -> TokenSlice:
        return self._context.tokens.padded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_wrapped"], name, value)

    def __repr__(self) -> str:
        return f"TextInputContext({self._context!r})"
