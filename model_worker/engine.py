"""One step on one device: rows, forward, sampling. The worker's loop and tests call the same `Engine.step`.

It knows rows and tokens; it does not know requests, sockets or text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import Join, RowGrammar, Step, StepResult
from interfaces.messages.forced_tokens import ForcedTokens
from interfaces.messages.hidden_states import HiddenStates
from interfaces.messages.logprob_reports import LogprobReports
from model_worker.batch import ForwardBatch
from model_worker.cpu.fused.stack import Drawn, Passes
from model_worker.device_copy import Download, Mark, upload, upload_together
from model_worker.execution import isolation
from model_worker.execution.ngram import draft
from model_worker.grammar.masks import Masks
from model_worker.rows import HiddenPart, PackedStep, WorkerRows
from model_worker.sampling.logprobs import ReportBuilder
from model_worker.sampling.sampler import Sampled, SamplerRows, with_largest

Forward = Callable[[ForwardBatch], torch.Tensor]
Pick = Callable[[ForwardBatch, NDArray[np.bool_]], tuple[NDArray[np.int64], torch.Tensor]]
BeginPick = Callable[[ForwardBatch, Drawn, int], Passes]
HiddenForward = Callable[[ForwardBatch], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Which worker slot this is, and its how-many-th start."""

    index: int
    epoch: int


class Flight:
    """A step that was begun, and `steps - 1` that repeat it. Results are made when somebody asks for them, in order."""

    def __init__(
        self, read: Callable[[int], StepResult], steps: int = 1, stop: Callable[[bool], int] | None = None
    ) -> None:
        """`read(number)` waits for the result of a step; `stop(for_good)` leaves out those that have not begun, and
        says how many have."""
        self.steps = steps
        self._read, self._stop = read, stop
        self._made: deque[StepResult] = deque()
        self._asked = self._told = 0

    @classmethod
    def landed(cls, *results: StepResult) -> Flight:
        """Steps that have their results already."""
        flight = cls(results.__getitem__, len(results))
        flight.land()
        return flight

    @property
    def left(self) -> int:
        """How many results nobody has been told of."""
        return self.steps - self._told

    @property
    def flying(self) -> bool:
        """Whether the device still owes a result."""
        return self._asked < self.steps

    @property
    def over(self) -> bool:
        """Whether the next result is there, so that asking for it waits for nothing."""
        return bool(self._made)

    def result(self) -> StepResult:
        """The next one. Waits for the device if need be."""
        if not self._made:
            self._make()
        self._told += 1
        return self._made.popleft()

    def stop(self, for_good: bool = True) -> None:
        """Leaves out the steps that have not begun, for good if another step follows; else somebody begins them."""
        if self._stop is not None and self.flying:
            self.steps = self._stop(for_good)

    def land(self) -> None:
        """Waits for all results."""
        while self.flying:
            self._make()

    def _make(self) -> None:
        self._made.append(self._read(self._asked))
        self._asked += 1


class Engine:
    """`forward` maps a packed batch to logits [L, vocab], `hidden_forward` to logits and hidden states [L, hidden].

    `pick` is `ModelRunner.pick`; without it greedy rows take the largest of their logits. Rows and sampler keep what
    must outlive a step. With `ahead` a step may begin before the tokens of the last one are read: they stay on the
    device, where the next step finds them. With `begin_pick`, which is `ModelRunner.begin_pick`, the same holds on a
    CPU for steps whose rows need nothing but their largest logit.

    Of a sequence that is computed by itself up to `most_drafts` tokens are guessed (`ngram.py`), where steps are to be
    repeated anyway and `pick` is given: one pass is then all repetitions whose tokens were guessed right.
    """

    def __init__(
        self,
        forward: Forward,
        rows: WorkerRows,
        sampler: SamplerRows,
        device: torch.device,
        identity: WorkerIdentity,
        hidden_forward: HiddenForward | None = None,
        masks: Masks | None = None,
        pick: Pick | None = None,
        ahead: bool = False,
        begin_pick: BeginPick | None = None,
        most_drafts: int = 0,
    ) -> None:
        self._forward = forward
        self._pick = pick
        self._hidden_forward = hidden_forward
        self._rows = rows
        self._sampler = sampler
        self._device = device
        self._identity = identity
        self._masks = masks
        self._begin_pick = begin_pick
        self._most_drafts = most_drafts if pick is not None else 0
        self.drafted = self.accepted = 0
        """Tokens that were guessed, and that were guessed right."""
        self._promising = False
        """Whether there was something to guess when a step's result was read."""
        self.ahead = ahead or begin_pick is not None
        self._flights: list[Flight] = []
        self._begun = 0
        self._last_tokens = torch.zeros(rows.max_rows, dtype=torch.int64, device=device)
        """Of rows whose last token the host has not read."""
        self._incarnation: int | None = None
        self._held: set[int] = set()
        self._alone: set[int] = set()
        self._refused: dict[int, str] = {}

    def run_ahead(self, begin_pick: BeginPick) -> None:
        """From the next step on, as with `begin_pick` from the beginning. No step may be under way."""
        self._begin_pick, self.ahead = begin_pick, True

    def rest(self) -> None:
        """Nothing is to be computed now: a good moment to begin with what takes seconds and may be wanted later."""
        if self._masks is not None:
            self._masks.start()

    def step(self, step: Step) -> StepResult:
        """Runs a step. Raises StepError when the step does not fit the rows; nothing else is expected to fail."""
        self._follow(step.incarnation)
        self._change_rows(step)
        return self._passes(step)

    def begin(self, step: Step) -> Flight:
        """Gives a step to the device and does not wait for it, unless one of its rows needs the host to sample.

        So it may do with some of those that repeat it: the flight says how many. Steps before this one that have not
        begun are left out. Raises as `step` does. Results must be asked for in the order of their steps.
        """
        for flight in self._flights:
            flight.stop()
        self._follow(step.incarnation)
        self._change_rows(step)
        if self._promising and len(step.rows) == 1:
            self._land()
        self._flights = [flight for flight in self._flights if flight.flying]
        self._promising = False
        packed = self._rows.pack(step)
        if not self._flights and len(drafted := self._drafted(step, packed)):
            return self._verify(step, packed, drafted)
        if self.ahead and not self._needs_host(packed):
            flight = self._launch(step, packed)
            self._flights.append(flight)
            return flight
        self._land()
        # Tokens that were not read then are missing in what was packed.
        return Flight.landed(self._passes(step, None if self._flights else packed))

    def _land(self) -> None:
        for flight in self._flights:
            flight.land()

    def _needs_host(self, packed: PackedStep) -> bool:
        if self._alone or packed.prompts or packed.hidden or packed.embeddings is not None:
            return True
        if self._begin_pick is not None:
            return bool(self._worked(packed).any())
        rows = packed.rows[packed.sampling]
        return self._sampler.needs_host(rows) or (self._masks is not None and bool(self._masks.constrain(rows).any()))

    def _drafted(self, step: Step, packed: PackedStep) -> NDArray[np.int32]:
        """Tokens that may follow the last one of the step's one row, as many as may be computed with it; or none."""
        rows = packed.rows
        alone = len(rows) == len(packed.tokens) == len(packed.sampling) == 1
        if not alone or not step.repeats or not self._most_drafts or self._alone or self._refused:
            return packed.tokens[:0]
        if packed.prompts or packed.hidden or packed.embeddings is not None:
            return packed.tokens[:0]
        if self._sampler.needs_host(rows) or (self._masks is not None and self._masks.constrain(rows).any()):
            return packed.tokens[:0]
        return self._draft(packed, 0, min(self._most_drafts, step.repeats))

    def _draft(self, packed: PackedStep, further: int, most: int) -> NDArray[np.int32]:
        """What may follow the tokens of the step's one row and so many `further` ones, up to `most` tokens."""
        if not most:
            return packed.tokens[:0]
        return draft(self._rows.text(int(packed.rows[0]), int(packed.positions[0]) + further), most)

    def _verify(self, step: Step, packed: PackedStep, drafted: NDArray[np.int32]) -> Flight:
        """Computes a row's token and those drafted after it in one pass, and draws what follows each of them.

        What was drawn after a token holds as long as all tokens up to it were drawn too. So they are the tokens that
        passes one by one would draw; only sums come in another order.
        """
        assert self._pick is not None
        started, count = time.perf_counter_ns(), 1 + len(drafted)
        several = replace(
            packed,
            tokens=np.concatenate([packed.tokens, drafted]),
            ntok=packed.ntok + len(drafted),
            kv_len=packed.kv_len + len(drafted),
        )
        rows, positions = np.repeat(packed.rows, count), packed.positions + np.arange(count)
        worked = self._sampler.needs_logits(rows, positions)
        largest, logits = self._pick(self._batch(several, np.arange(count)), worked)
        drawn = self._sampler.sample(logits, rows[worked], positions[worked]) if worked.any() else None
        sampled = with_largest(largest, worked, drawn)
        held = _holding(sampled, drafted)
        self._rows.drafted_step(packed, sampled.tokens[:held])
        self.drafted, self.accepted = self.drafted + len(drafted), self.accepted + held - 1
        # The others came with the first one.
        times = [(time.perf_counter_ns() - started) // 1000] + [0] * (held - 1)
        result = partial(self._result, incarnation=step.incarnation, rows=packed.rows, errors={})
        return Flight.landed(
            *(result(step.step + i, sampled=sampled.only(i), device_us=taken) for i, taken in enumerate(times))
        )

    def _launch(self, step: Step, packed: PackedStep) -> Flight:
        self._begun += 1
        number, rows = self._begun, packed.rows[packed.sampling]
        errors = self._refusals(rows)
        if self._begin_pick is not None:
            return self._launch_stack(step, packed, rows, errors, number)
        wait = self._draw_on_device(packed, rows)
        self._rows.begun_steps(packed, number, 1)

        def read(_: int) -> StepResult:
            tokens, device_us = wait()
            sampled = Sampled.of(tokens)
            self._rows.read_step(packed, sampled.tokens, number)
            self._rows.read_last(packed, number)
            return self._result(step.step, step.incarnation, rows, sampled, errors, device_us)

        return Flight(read)

    def _draw_on_device(self, packed: PackedStep, rows: NDArray[np.int32]) -> Callable[[], tuple[NDArray[Any], int]]:
        """Returns what waits for the tokens and the time that they took in us."""
        began = Mark(self._device)
        with torch.inference_mode():
            logits = self._forward(self._batch_ahead(packed))
            tokens = self._sampler.sample_ahead(logits[: len(rows)], rows, packed.positions)
            self._last_tokens.index_copy_(0, upload(rows.astype(np.int64), self._device), tokens.clamp(min=0))
            copied = Download(tokens)
        return lambda: (copied.wait(), copied.done.us_since(began))

    def _launch_stack(
        self, step: Step, packed: PackedStep, rows: NDArray[np.int32], errors: dict[int, str], number: int
    ) -> Flight:
        """On a CPU, for rows that take the largest of their logits: the step, and what repeats it."""
        assert self._begin_pick is not None
        since = time.perf_counter_ns()
        unread = np.full(len(packed.tokens), -1)
        places, owners = self._rows.unread(packed)
        unread[places] = owners
        drawn = Drawn(unread, rows.astype(np.int64), self._last_tokens.numpy())
        passes = self._begin_pick(self._batch(packed), drawn, 1 + step.repeats)
        planned, replaced = passes.count, False
        self._rows.begun_steps(packed, number, planned)

        def read(which: int) -> StepResult:
            nonlocal since
            sampled = Sampled.of(passes.wait(which))
            self._rows.read_step(packed, sampled.tokens, number, which)
            if len(rows) == 1 and len(self._draft(packed, which + 1, self._most_drafts)):
                self._promising = True
                for flight in self._flights:
                    flight.stop(for_good=False)
            last = which == passes.count - 1
            if last:
                self._rows.read_last(packed, number)
            began, since = since, time.perf_counter_ns()
            device_us = (since - began) // 1000
            result = self._result(step.step + which, step.incarnation, rows, sampled, errors, device_us)
            return replace(result, last=True) if last and replaced else result

        def stop(for_good: bool) -> int:
            nonlocal planned, replaced
            passes.stop()
            replaced = replaced or (for_good and passes.count < planned)
            self._rows.left_out(packed.rows, number, planned - passes.count)
            planned = passes.count
            return planned

        return Flight(read, passes.count, stop)

    def _batch_ahead(self, packed: PackedStep) -> ForwardBatch:
        batch = self._batch(packed)
        places, rows = self._rows.unread(packed)
        if not len(places):
            return batch
        where, owners = upload_together((places, rows), np.int64, self._device)
        return replace(batch, tokens=batch.tokens.index_copy(0, where, self._last_tokens[owners]))

    def _passes(self, step: Step, packed: PackedStep | None = None) -> StepResult:
        if not self._alone:
            return self._pass(step, packed)
        results = [self._pass(part) for part in isolation.parts(step, self._alone)]
        return isolation.together(step, results) if len(results) > 1 else results[0]

    def _pass(self, step: Step, packed: PackedStep | None = None) -> StepResult:
        started = time.perf_counter_ns()
        packed = packed or self._rows.pack(step)
        worked = self._worked(packed)
        if worked.all():
            logits, hidden = self._run(packed)
            sampled, forced = self._sample(packed, logits)
            reports = self._reports(packed, logits, sampled)
        else:
            sampled, forced = self._pick_and_sample(packed, worked)
            hidden, reports = None, sampled.reports
        self._rows.computed_step(packed, sampled.tokens)
        for row, tokens in forced.items():
            self._rows.follow(row, tokens)
            self._sampler.follow(row, tokens)
        rows = packed.rows[packed.sampling]
        device_us = (time.perf_counter_ns() - started) // 1000
        result = self._result(step.step, step.incarnation, rows, sampled, self._refusals(rows), device_us)
        if forced:
            result = _with_forced(result, forced)
        if reports is None and hidden is None:
            return result
        return _with_reports(result, reports, hidden)

    def _follow(self, incarnation: int) -> None:
        """A new scheduler knows nothing of the rows of the old one."""
        if incarnation == self._incarnation:
            return
        self._incarnation = incarnation
        self._rows.clear()
        for row in self._held:
            self._drop(row)
        self._held.clear()
        self._alone.clear()
        self._refused.clear()

    def _change_rows(self, step: Step) -> None:
        for row in step.drop.tolist():
            self._held.discard(row)
            self._alone.discard(row)
            self._refused.pop(row, None)
            self._drop(row)
        self._rows.apply(step)
        for join in step.joins:
            if join.alone:
                self._alone.add(join.row)
            try:
                if join.images:
                    raise ValueError("this model takes no images")
                if join.hidden_from is not None and self._hidden_forward is None:
                    raise ValueError("hidden states are not supported for this model")
                prompt, emitted = np.split(join.tokens, [join.prompt_len])
                self._sampler.join(join.row, join.sampling, join.sampling.stop_token_ids or [], prompt, emitted)
                self._held.add(join.row)
                if join.grammar is not None:
                    self._constrain(join, join.grammar, emitted)
            except ValueError as error:
                # The row runs on, greedily, and its owner hears of the error with the first token it would have had:
                # until then the scheduler matches no results with it.
                self._refused[join.row] = str(error)
        if self._masks is not None:
            self._masks.flush()

    def _constrain(self, join: Join, grammar: RowGrammar, emitted: NDArray[np.int32]) -> None:
        if self._masks is None:
            raise ValueError("this engine was made without masks: it generates free text only")
        # Of a token that is not sampled there are no logits to tell of.
        told = join.sampling.reports or join.sampling.logprobs or join.hidden_from is not None
        self._masks.join(join.row, grammar, emitted, jumps=not told)

    def _drop(self, row: int) -> None:
        self._sampler.drop(row)
        if self._masks is not None:
            self._masks.drop(row)

    def _run(self, packed: PackedStep) -> tuple[torch.Tensor, HiddenStates | None]:
        batch = self._batch(packed)
        if not packed.hidden or self._hidden_forward is None:
            return self._forward(batch), None
        logits, hidden = self._hidden_forward(batch)
        told = sum(part.count for part in packed.hidden)
        return logits, _hidden_states(packed.hidden, hidden[len(hidden) - told :])

    def _batch(self, packed: PackedStep, wanted: NDArray[np.int64] | None = None) -> ForwardBatch:
        """`wanted` are the packed tokens whose logits count, if not those that `_wanted` names."""
        return ForwardBatch.build(
            tokens=packed.tokens,
            query_lens=packed.ntok,
            kv_lens=packed.kv_len,
            block_tables=packed.block_tables,
            block_size=self._rows.block_size,
            logit_positions=_wanted(packed) if wanted is None else wanted,
            device=self._device,
            embeddings=packed.embeddings,
        )

    def _sample(self, packed: PackedStep, logits: torch.Tensor) -> tuple[Sampled, dict[int, list[int]]]:
        """The new tokens, and what follows them by force, by row."""
        if not len(packed.sampling):
            return Sampled(np.empty(0, np.int32), None, None), {}
        rows, logits = packed.rows[packed.sampling], logits[: len(packed.sampling)]
        sampled = self._draw(logits, rows, packed.positions)
        return sampled, {} if self._masks is None else self._masks.sampled(rows, sampled.tokens)

    def _worked(self, packed: PackedStep) -> NDArray[np.bool_]:
        """Which of the rows that sample need their logits; all, where more than tokens is told of any."""
        rows = packed.rows[packed.sampling]
        if self._pick is None or packed.prompts or packed.hidden:
            return np.ones(len(rows), np.bool_)
        worked = self._sampler.needs_logits(rows, packed.positions)
        return worked if self._masks is None else worked | self._masks.constrain(rows)

    def _pick_and_sample(self, packed: PackedStep, worked: NDArray[np.bool_]) -> tuple[Sampled, dict[int, list[int]]]:
        """As `_run` and `_sample`, where the largest logit is all that some rows need."""
        assert self._pick is not None
        largest, logits = self._pick(self._batch(packed), worked)
        rows = packed.rows[packed.sampling]
        drawn = self._draw(logits, rows[worked], packed.positions[worked]) if worked.any() else None
        sampled = with_largest(largest, worked, drawn)
        return sampled, {} if self._masks is None else self._masks.sampled(rows, sampled.tokens)

    def _draw(self, logits: torch.Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> Sampled:
        """One token for each row; what its grammar forbids is no choice."""
        if self._masks is not None:
            self._refused |= self._masks.apply(logits, rows)
        return self._sampler.sample(logits, rows, positions)

    def _reports(self, packed: PackedStep, logits: torch.Tensor, sampled: Sampled) -> LogprobReports | None:
        """What the prompts' parts and the sampled rows tell."""
        if not packed.prompts:
            return sampled.reports
        builder, start = ReportBuilder(), len(packed.sampling)
        for part in packed.prompts:
            stop = start + len(part.tokens)
            self._sampler.report_prompt(builder, part.row, part.first, logits[start:stop], part.tokens)
            start = stop
        found = [reports for reports in (builder.columns(), sampled.reports) if reports is not None]
        return LogprobReports.joined(found)

    def _refusals(self, rows: NDArray[np.int32]) -> dict[int, str]:
        return {row: self._refused[row] for row in rows.tolist() if row in self._refused} if self._refused else {}

    def _result(
        self,
        number: int,
        incarnation: int,
        rows: NDArray[np.int32],
        sampled: Sampled,
        errors: dict[int, str],
        device_us: int,
    ) -> StepResult:
        if sampled.bad is not None:
            errors = errors | {row: self._sampler.why_bad(row) for row in rows[sampled.bad].tolist()}
        kept = _kept(rows, errors)
        return StepResult(
            incarnation=incarnation,
            epoch=self._identity.epoch,
            index=self._identity.index,
            step=number,
            rows=rows[kept],
            tokens=sampled.tokens[kept],
            logprobs=None if sampled.logprobs is None else sampled.logprobs[kept],
            errors=errors,
            device_us=device_us,
        )


def _holding(sampled: Sampled, drafted: NDArray[np.int32]) -> int:
    """How many of the tokens that were drawn hold: those after tokens that were drawn too."""
    wrong = sampled.tokens[:-1] != drafted
    if sampled.bad is not None:
        wrong |= sampled.bad[:-1]
    return int(np.argmax(wrong)) + 1 if wrong.any() else len(sampled.tokens)


def _wanted(packed: PackedStep) -> NDArray[np.signedinteger[Any]]:
    """Rows that sample come first; then the tokens whose successors in a prompt are reported; then those whose hidden
    states are told."""
    wanted: list[NDArray[np.signedinteger[Any]]] = [np.cumsum(packed.ntok)[packed.sampling] - 1]
    wanted += [part.offset + np.arange(len(part.tokens)) for part in packed.prompts]
    wanted += [part.offset + np.arange(part.count) for part in packed.hidden]
    return np.concatenate(wanted) if len(wanted) > 1 else wanted[0]


def _with_forced(result: StepResult, forced: dict[int, list[int]]) -> StepResult:
    """Rows that failed go on with nothing."""
    kept = {row: tokens for row, tokens in forced.items() if row not in result.errors}
    return replace(result, forced=ForcedTokens.of(kept)) if kept else result


def _with_reports(result: StepResult, reports: LogprobReports | None, hidden: HiddenStates | None) -> StepResult:
    """Rows that failed report nothing."""
    if reports is not None:
        reports = reports.select(~np.isin(reports.owners, list(result.errors)))
    if hidden is not None:
        kept = ~np.isin(hidden.owners, list(result.errors))
        hidden = hidden.select(kept) if kept.any() else None
    return replace(result, reports=reports, hidden=hidden)


def _hidden_states(parts: list[HiddenPart], vectors: torch.Tensor) -> HiddenStates:
    return HiddenStates(
        owners=np.repeat([part.row for part in parts], [part.count for part in parts]).astype(np.int32),
        positions=np.concatenate([part.first + np.arange(part.count) for part in parts]).astype(np.int32),
        values=vectors.float().cpu().numpy().ravel(),
    )


def _kept(rows: NDArray[np.int32], errors: dict[int, str]) -> NDArray[np.bool_] | slice:
    return ~np.isin(rows, list(errors)) if errors else slice(None)
