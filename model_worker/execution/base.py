"""The state that all executors share: the rows, the backend that computes a batch, and how a result is made.

Knows columns of rows and tensors. Does not know which executor takes which step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import Step, StepResult
from model_worker.adapter_loads import AdapterLoads
from model_worker.backends.base import Backend, GreedyTokens
from model_worker.batch import ForwardBatch
from model_worker.drafters.pass_times import PassTimes
from model_worker.drafters.several import Drafters
from model_worker.execution.flight import InFlight, Pending
from model_worker.execution.pass_room import PassRoom
from model_worker.grammar.masks import Masks
from model_worker.kv_spill.mover import KvMover
from model_worker.kv_spill.shipper import KvShipper
from model_worker.model import TakeResiduals
from model_worker.rows import PackedStep, WorkerRows
from model_worker.sampling.sampler import Sampled, SamplerRows
from model_worker.vision.encode_queue import EncodeQueue
from model_worker.vision.rows import ImageRows


class Executor(Protocol):
    """One way to run a step. `launch` is called right after `accepts` has returned True for the same step."""

    def accepts(self, step: Step, packed: PackedStep) -> bool: ...

    def launch(self, step: Step, packed: PackedStep) -> Pending: ...


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The index of the worker's slot, and the number of its earlier starts."""

    index: int
    epoch: int


@dataclass(slots=True)
class Counters:
    """Counts of tokens that were guessed, and of guesses that were right.

    `drafts` counts rows of passes that had guesses, and `accepted_at[i]` the right guesses with i others before them.
    `step_tokens` are the most tokens of a step for which there is memory now; None: as many as for others.
    """

    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    step_tokens: int | None = None

    def count(self, drafted: int, accepted: int) -> None:
        """Count the guesses of a row in a pass."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for depth in range(accepted):
            self.accepted_at[depth] += 1


class RunningRows:
    """The state of the running rows. The engine changes it step by step, and executors read it."""

    def __init__(
        self,
        rows: WorkerRows,
        sampler: SamplerRows,
        masks: Masks | None,
        images: ImageRows | None = None,
        *,
        identity: WorkerIdentity,
        gives_hidden_states: bool,
        keeps_states: bool = False,
    ) -> None:
        self.identity = identity
        self.rows = rows
        self.sampler = sampler
        self.masks = masks
        self.images = rows.images = images
        # Encodes the images of rows beside the steps; None: a step that joins a row does.
        self.encoding: EncodeQueue | None = None
        # Reads adapters beside the steps; None: the model takes none.
        self.adapters: AdapterLoads | None = None
        # Keeps blocks beside the KV cache; None: none are kept.
        self.moves: KvMover | None = None
        # Sends blocks to other workers; None: none are sent.
        self.shipper: KvShipper | None = None
        self.gives_hidden_states = gives_hidden_states
        # None: nothing is guessed.
        self.drafters: Drafters | None = None
        # Rows that share no forward pass.
        self.isolated: set[int] = set()
        # Rows whose next token is an error instead, and the error.
        self.refused: dict[int, str] = {}
        self.in_flight = InFlight()
        # Whether rows have recurrent states, which a pass advances.
        self.keeps_states = keeps_states
        # Those whose states a pass that failed has left: nothing more is computed of them until they are dropped.
        self.lost: set[int] = set()
        self.room = PassRoom()
        # Whether the step that is being launched has changed nothing yet that a second launch would change again.
        self.repeatable = True
        self.counters = Counters()


class DeviceStep(RunningRows):
    """The running rows, with the backend that computes a step of them on one device."""

    def __init__(
        self,
        rows: WorkerRows,
        sampler: SamplerRows,
        backend: Backend,
        identity: WorkerIdentity,
        masks: Masks | None = None,
        images: ImageRows | None = None,
    ) -> None:
        super().__init__(
            rows,
            sampler,
            masks,
            images,
            identity=identity,
            gives_hidden_states=backend.gives_hidden_states,
            keeps_states=backend.keeps_states,
        )
        self.backend = backend
        self.times = PassTimes()
        # Seconds of the last pass that was waited for.
        self._computed = 0.0
        # Whose residuals a drafter reads.
        self._watched: tuple[Sequence[int], TakeResiduals] | None = None

    def watch(self, layers: Sequence[int], take: TakeResiduals) -> None:
        """Give `take` the residuals of these layers in all steps, as `Backend.watch` does."""
        self._watched = layers, take
        self.backend.watch(layers, take)

    def change_backend(self, backend: Backend) -> None:
        """Compute the next steps by this backend, on the same blocks. No step is in flight."""
        self.backend = backend
        self.gives_hidden_states = backend.gives_hidden_states
        if self._watched is not None:
            backend.watch(*self._watched)

    def batch(
        self,
        packed: PackedStep,
        wanted: NDArray[np.int64] | None = None,
        owners: NDArray[np.int64] | None = None,
        last_tokens: torch.Tensor | None = None,
        drawing: Sequence[NDArray[Any]] = (),
    ) -> ForwardBatch:
        """Make the forward's input. `wanted` are the packed tokens whose logits count; by default `_wanted`. `owners`,
        `last_tokens` and `drawing` are those of ForwardBatch."""
        return ForwardBatch.build(
            tokens=packed.tokens,
            query_lens=packed.ntok,
            kv_lens=packed.kv_len,
            block_tables=packed.block_tables,
            block_size=self.rows.block_size,
            logit_positions=_wanted(packed) if wanted is None else wanted,
            device=self.backend.device,
            embeddings=packed.embeddings,
            angles=packed.angles,
            seen=packed.seen,
            adapters=packed.adapters,
            rows=packed.rows,
            owners=owners,
            last_tokens=last_tokens,
            drawing=drawing,
        )

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """As `Backend.logits`, and the time is learnt."""
        begun = time.perf_counter()
        logits = self.backend.logits(batch)
        self._learn(batch, time.perf_counter() - begun)
        return logits

    def greedy(self, batch: ForwardBatch, needed: NDArray[np.bool_]) -> tuple[GreedyTokens, torch.Tensor]:
        """As `Backend.greedy`, and the time is learnt."""
        begun = time.perf_counter()
        result = self.backend.greedy(batch, needed)
        self._learn(batch, time.perf_counter() - begun)
        return result

    def waited(self, drawn: int, started_ns: int) -> None:
        """Learn from a step that has ended, which waited for its last pass and drew so many tokens."""
        self.times.waited(drawn, started_ns / 1e9, self._computed, time.perf_counter())

    def _learn(self, batch: ForwardBatch, seconds: float) -> None:
        self._computed = seconds
        # A prompt's tokens have no logits.
        if len(batch.logit_positions) == batch.num_tokens:
            self.times.computed(batch.num_tokens, seconds)

    def needs_logits(self, packed: PackedStep) -> NDArray[np.bool_]:
        """Return which sampling rows need more than their largest logit: all, where more than tokens is reported."""
        rows = packed.sampling_rows
        if packed.prompts or packed.hidden:
            return np.ones(len(rows), np.bool_)
        needed = self.sampler.needs_logits(rows, packed.positions)
        return needed if self.masks is None else needed | self.masks.constrain(rows)

    def needs_host(self, rows: NDArray[np.int32]) -> bool:
        """Whether sampling these rows takes or gives more than logits and a token, or goes on by a grammar."""
        return self.sampler.needs_host(rows) or (self.masks is not None and bool(self.masks.constrain(rows).any()))

    def refusals(self, rows: NDArray[np.int32]) -> dict[int, str]:
        """Return those of the rows that were refused, and why."""
        refused = self.refused
        return {row: refused[row] for row in rows.tolist() if row in refused} if refused else {}

    def result(
        self,
        number: int,
        incarnation: int,
        rows: NDArray[np.int32],
        sampled: Sampled,
        errors: dict[int, str],
        device_us: int,
    ) -> StepResult:
        """Make the result of step `number`, in which `rows` sampled."""
        if sampled.bad is not None:
            errors = errors | {row: self.sampler.why_bad(row) for row in rows[sampled.bad].tolist()}
        kept = _without_errors(rows, errors)
        return StepResult(
            incarnation=incarnation,
            epoch=self.identity.epoch,
            index=self.identity.index,
            step=number,
            rows=rows[kept],
            tokens=sampled.tokens[kept],
            logprobs=None if sampled.logprobs is None else sampled.logprobs[kept],
            errors=errors,
            device_us=device_us,
        )


def _wanted(packed: PackedStep) -> NDArray[np.signedinteger[Any]]:
    """Return packed tokens whose logits count: of sampling rows, then of reported prompts, then of hidden states."""
    wanted: list[NDArray[np.signedinteger[Any]]] = [packed.last_of_sampling]
    wanted += [part.offset + np.arange(len(part.tokens)) for part in packed.prompts]
    wanted += [part.offset + np.arange(part.count) for part in packed.hidden]
    return np.concatenate(wanted) if len(wanted) > 1 else wanted[0]


def _without_errors(rows: NDArray[np.int32], errors: dict[int, str]) -> NDArray[np.bool_] | slice:
    return ~np.isin(rows, list(errors)) if errors else slice(None)
