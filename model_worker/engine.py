"""Applies a step's changes to the rows, and gives it to the first executor that accepts it.

Only what every model and every step shares may stand here. The rarer a feature, the deeper it lives: how a step runs
(guessed, overlapped, row by row) in `execution/`, how a token is chosen in `sampling/`, what a grammar allows in
`grammar/`. An engine knows rows and tokens; it does not know requests, sockets, text, or what computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from interfaces import Join, RowGrammar, Step, StepResult
from model_worker.adapter_loads import AdapterLoads
from model_worker.execution.base import Counters, Executor, RunningRows, WorkerIdentity
from model_worker.execution.flight import Pending
from model_worker.execution.lost_rows import launched_with_states, without
from model_worker.execution.out_of_memory import launched
from model_worker.kv_spill.mover import KvMover
from model_worker.kv_spill.shipper import KvShipper
from model_worker.rows import StepError
from model_worker.vision.encode_queue import EncodeQueue


class Engine:
    """Runs the steps of one worker. The worker's loop and tests call the same `begin`."""

    takes = Step

    def __init__(self, running: RunningRows, executors: Sequence[Executor]) -> None:
        """The executors work on the same `running` rows. The last one must accept every step."""
        self._running = running
        self._executors = tuple(executors)
        self._incarnation: int | None = None
        # Rows with sampling values.
        self._held: set[int] = set()

    @property
    def counters(self) -> Counters:
        return self._running.counters

    @property
    def encoding(self) -> EncodeQueue | None:
        """The images that are being encoded beside the steps."""
        return self._running.encoding

    @property
    def adapters(self) -> AdapterLoads | None:
        """The adapters that are read beside the steps; None: the model takes none."""
        return self._running.adapters

    @property
    def moves(self) -> KvMover | None:
        """What keeps blocks beside the KV cache; None: none are kept."""
        return self._running.moves

    @property
    def shipper(self) -> KvShipper | None:
        """What sends blocks to other workers; None: none are sent."""
        return self._running.shipper

    def rest(self) -> None:
        """Start the process that fills masks, which takes seconds. To be called when there is nothing to compute."""
        if self._running.masks is not None:
            self._running.masks.start()

    def beat(self) -> None:
        """Nothing is due by time here."""

    def forget(self) -> None:
        """Forget all rows: the next step is for another registration of this worker."""
        self._forget_rows()

    def step(self, step: Step) -> StepResult:
        """Run a step and wait for its result. Raises as `begin` does."""
        return self.begin(step).result()

    def begin(self, step: Step) -> Pending:
        """Launch a step.

        Results must be read in the order of their steps. Raises StepError when the step does not fit the rows; nothing
        else is expected to fail.
        """
        if step.incarnation != self._incarnation:
            self._forget_rows()
            self._incarnation = step.incarnation
        if step.save is not None or step.load is not None:
            self._move(step)
        self._change_rows(step)
        running = self._running
        if running.lost:
            step = without(step, running.lost)
        if not len(step.rows):
            return Pending.finished(_nothing(step, running.identity))
        packed = running.rows.pack(step)
        launch = launched_with_states if running.keeps_states else launched
        for executor in self._executors:
            if executor.accepts(step, packed):
                return launch(executor, step, packed, running, self._executors[-1])
        raise RuntimeError(f"no executor accepts step {step.step}: the last one of an engine must accept every step")

    def _forget_rows(self) -> None:
        """A new scheduler knows nothing of the rows of the old one."""
        self._running.rows.clear()
        for row in self._held:
            self._drop(row)
        self._held.clear()
        if self._running.images is not None:
            self._running.images.clear()
        if self._running.moves is not None:
            self._running.moves.forget()
        self._running.isolated.clear()
        self._running.refused.clear()
        self._running.lost.clear()

    def _move(self, step: Step) -> None:
        """Begin to save and to load blocks. What is saved is what the steps before this one leave."""
        running = self._running
        if running.moves is None:
            raise StepError(f"step {step.step} saves or loads blocks, and nothing here keeps any")
        if running.moves.still:
            running.in_flight.finish()
        running.moves.order(step)

    def _change_rows(self, step: Step) -> None:
        running = self._running
        for row in step.drop.tolist():
            self._held.discard(row)
            running.isolated.discard(row)
            running.refused.pop(row, None)
            running.lost.discard(row)
            if running.images is not None:
                running.images.drop(row)
            self._drop(row)
        running.rows.apply(step)
        for join in step.joins:
            if join.isolated:
                running.isolated.add(join.row)
            try:
                self._join(join, step.step)
            except ValueError as error:
                # The row runs on, greedily, and its first token is an error instead: until then the scheduler matches
                # no results with it.
                running.refused[join.row] = str(error)
        if running.masks is not None:
            running.masks.flush()

    def _join(self, join: Join, step: int) -> None:
        if join.images:
            if self._running.images is None:
                raise ValueError("this model takes no images")
            self._running.images.join(join, step)
        if join.hidden_from is not None and not self._running.gives_hidden_states:
            raise ValueError("hidden states are not supported for this model")
        prompt, emitted = np.split(join.tokens, [join.prompt_len])
        self._running.sampler.join(join.row, join.sampling, join.sampling.stop_token_ids or [], prompt, emitted)
        self._held.add(join.row)
        if self._running.drafters is not None:
            self._running.drafters.join(join)
        if join.grammar is not None:
            self._constrain(join, join.grammar, emitted)

    def _constrain(self, join: Join, grammar: RowGrammar, emitted: NDArray[np.int32]) -> None:
        if self._running.masks is None:
            raise ValueError("this engine was made without masks: it generates free text only")
        # A forced token is not sampled: it has no logits to report.
        reported = join.sampling.reports or join.sampling.logprobs or join.hidden_from is not None
        self._running.masks.join(join.row, grammar, emitted, jumps=not reported)

    def _drop(self, row: int) -> None:
        if self._running.drafters is not None:
            self._running.drafters.drop(row)
        self._running.sampler.drop(row)
        if self._running.masks is not None:
            self._running.masks.drop(row)


def _nothing(step: Step, identity: WorkerIdentity) -> StepResult:
    """The result of a step that only changes rows."""
    none = np.empty(0, np.int32)
    return StepResult(step.incarnation, identity.epoch, identity.index, step.step, none, none, None, {}, 0)
