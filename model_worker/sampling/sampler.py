"""From logits to the next token of every row: the row table of sampling values, and the fixed order of operations.

For each row of logits, in this order, each step only where the row asks for it:

    0. watermark          added to the green tokens: see `watermark.py`
    1. penalties          on tokens of the output, or of prompt + output (`penalize_prompt`): see `penalties.py`
    2. min_new_tokens     stop ids get -inf until so many tokens are emitted
    3. logit_bias         added; tokens that are not allowed, and the ends of bad words, get -inf (`token_rules.py`),
                          unless nothing else is left; then the operator's processors: see `processors.py`
    4. greedy             the largest logit, lower id first among equals, ends here (temperature 0, or top_k 1)
    5. temperature        divided out; below 1e-6 it counts as 1e-6, above 1e6 as 1e6
    6. top-k, top-p, min-p  in this order, each renormalised over what the one before kept; ties as `draw.py` says;
                          then typical-p: see `typical.py`
    7. the draw           argmax over the kept tokens of logit + Gumbel noise of (seed, position, token); position is
                          the absolute index that the new token will have in its sequence

A grammar's mask (`masks.py`) is -inf put on the logits beforehand: every step leaves -inf alone, so its place among 1
to 3 makes no difference. Where nothing but the end is left, min_new_tokens gives way. A row of which no token is left,
or with a NaN or infinity, is bad: it fails alone.

Log-probabilities are natural logs of the chosen token. TEMPERED is the log-softmax after step 5, before truncation
(OpenAI, SGLang; temperature 0 divides nothing, so it is the model's own log-softmax there). WARPED is renormalised
over what step 6 kept (TGI); at temperature 0 nothing is truncated and the two agree. The most probable and the named
tokens that a row wants reported (`logprobs.py`) have the values of the same distribution; under WARPED a token that was
not kept is impossible.

Dialect notes. SGLang applies top-k and top-p jointly when no request of the batch has min_p; here truncation is
sequential always, as in TGI and transformers, because a row must not depend on its neighbours. TGI counts frequency
over prompt + output divided by length and applies repetition first; SGLang the reverse: both are kept.

Steps 0 to 3 are stages of one form, `stages.py`, and share it with the operator's processors.

A batch of greedy rows without other wishes is one `max` over the logits in their own dtype. Knows rows and tensors;
it does not know requests, blocks or sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode, LogprobReports, SamplingParams
from model_worker.device_copy import HostRing, upload_together
from model_worker.sampling import draw_proof
from model_worker.sampling.ahead import Ahead
from model_worker.sampling.device_draw import DeviceDraw, RowsAhead
from model_worker.sampling.device_penalties import DevicePenaltyStage
from model_worker.sampling.device_rules import DeviceRuleStage
from model_worker.sampling.draw_records import RecordTable, RowMasks
from model_worker.sampling.draw_triton import TritonDraw
from model_worker.sampling.host_draw import HostDraw
from model_worker.sampling.logprobs import CHOSEN_ONLY, ReportBuilder, Wanted
from model_worker.sampling.penalties import PenaltyStage
from model_worker.sampling.processors import ProcessedRows
from model_worker.sampling.registry import Processor
from model_worker.sampling.row_values import ROW_VALUES, known_tokens, row_values
from model_worker.sampling.stages import AnyStage, JoiningRow
from model_worker.sampling.token_rules import RuleStage
from model_worker.sampling.watermark import Watermark


@dataclass(frozen=True)
class Sampled:
    """The choices of one step.

    A bad row (NaN, or no finite logit) has token 0: a valid id, because the next step may be in flight already.
    `logprobs` is None when no row asked, and NaN in rows that did not ask. `reports` have the rows that asked for more.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    bad: NDArray[np.bool_] | None
    reports: LogprobReports | None = None

    @staticmethod
    def of(
        tokens: NDArray[np.int64], logprobs: NDArray[np.float32] | None = None, reports: LogprobReports | None = None
    ) -> Sampled:
        """Make the choices from tokens that are -1 where a row is bad."""
        bad = tokens < 0
        return Sampled(np.where(bad, 0, tokens).astype(np.int32), logprobs, bad if bad.any() else None, reports)

    def only(self, index: int) -> Sampled:
        """Return the choice of one row of logits, which reports nothing."""
        part = slice(index, index + 1)
        return Sampled(self.tokens[part], None, None if self.bad is None or not self.bad[index] else self.bad[part])


class SamplerRows:
    """Sampling values of up to `max_rows` running sequences, by row.

    Logits may be wider than `vocab_size` (padded embeddings): the columns beyond it are never chosen.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        processors: Mapping[str, Processor] | None = None,
        has_kernels: bool = True,
        counts_there: bool | None = None,
    ) -> None:
        """Without kernels a CPU draws in plain torch, which is slower and gives the same.

        `counts_there`: penalties count tokens on the device; by default where that is no CPU.
        """
        self._table = np.zeros(max_rows, ROW_VALUES)
        self._vocab_size = vocab_size
        self._device = device
        self._wanted: dict[int, Wanted] = {}
        self._records = RecordTable(max_rows, vocab_size)
        self._processed = ProcessedRows(max_rows, processors or {})
        there = device.type != "cpu" if counts_there is None else counts_there
        self._device_penalties = DevicePenaltyStage(max_rows, vocab_size, device, self._records) if there else None
        # In the order of their operations.
        self._stages: tuple[AnyStage, ...] = (
            Watermark(max_rows),
            self._device_penalties or PenaltyStage(max_rows, vocab_size),
            DeviceRuleStage(max_rows, vocab_size, self._records) if there else RuleStage(max_rows, vocab_size),
            self._processed,
        )
        self._host_draw = HostDraw(vocab_size, has_kernels, self._stages, self._wanted)
        self._device_draw = DeviceDraw(self._stages, self._device_penalties, self._records, HostRing(device))

    def warm_up(self, dtype: torch.dtype = torch.float32) -> None:
        """Compile, or load from the cache, the kernels that the first sampled token would otherwise wait for.

        `dtype` is that of the logits of steps.
        """
        neutral = SamplerRows(1, 8, self._device)
        nothing = np.empty(0, np.int32)
        neutral.join(0, SamplingParams(top_k=4, top_p=0.9, logprobs=LogprobMode.WARPED), [], nothing, nothing)
        arguments = (torch.zeros((1, 8), device=self._device), np.zeros(1, np.int32), np.zeros(1, np.int64))
        neutral.sample(*arguments)
        if self._device.type == "cuda":
            plain, other = (SamplerRows(draw_proof.ROWS, self._vocab_size, self._device) for _ in range(2))
            self.use_kernels(draw_proof.proven(self._device, plain, other, dtype))

    def use_kernels(self, kernels: TritonDraw | None) -> None:
        """Draw ahead by these kernels from now on; None: by torch's operations."""
        self._device_draw.kernels = kernels

    def join(
        self,
        row: int,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        prompt: NDArray[np.int32],
        emitted: NDArray[np.int32],
    ) -> None:
        """Give `row` to a sequence, new or replayed; `ValueError` leaves the row free."""
        self._check_rows(np.array([row]))
        if self._table["held"][row]:
            raise ValueError(f"row {row} is held by another sequence: drop it first")
        joining = JoiningRow(params, stop_token_ids, prompt, emitted)
        states = [stage.state_of(joining) for stage in self._stages]
        wanted = Wanted(params.top_logprobs, known_tokens("logprob_ids", params.logprob_ids, self._vocab_size))
        processed = states[-1] is not None
        self._table[row] = row_values(params, len(prompt), self._vocab_size, processed)
        self._records.hold(row, self._table[row], wanted.ids)
        if params.reports:
            self._wanted[row] = wanted
        for stage, state in zip(self._stages, states, strict=True):
            stage.hold(row, state)

    def drop(self, row: int) -> None:
        """Free `row`; a row that is free already (its join was refused) stays so."""
        self._check_rows(np.array([row]))
        self._wanted.pop(row, None)
        for stage in self._stages:
            stage.drop(row)
        self._records.drop(row)
        self._table[row] = np.zeros((), ROW_VALUES)

    def follow(self, row: int, tokens: Sequence[int]) -> None:
        """Record jump-forward tokens: `row` has gone on by tokens that were not drawn."""
        for stage in self._stages:
            stage.followed(row, tokens)

    def needs_logits(self, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the rows for which the argmax alone does not give the result of `sample`."""
        self._check_rows(rows)
        table = self._table
        needed: NDArray[np.bool_] = table["worked"][rows] | (positions < table["may_stop_at"][rows])
        return needed

    def sample(self, logits: torch.Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> Sampled:
        """Choose one token for each row; `logits[i]` and `positions[i]` belong to `rows[i]`.

        Rows that do not need the host may come more than once, at different positions. A free row (its join was refused
        while a step that names it was in flight) is greedy.
        """
        values = self._gather(logits, rows, positions)
        logits = logits[:, : self._vocab_size]
        worked = self.needs_logits(rows, positions)
        tokens = np.empty(len(rows), np.int64)
        plain = np.flatnonzero(~worked)
        if len(plain):
            tokens[plain] = argmax(_take(logits, plain))
        if len(plain) == len(rows):
            return Sampled.of(tokens)
        index = np.flatnonzero(worked)
        copied = _take(logits, index).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        logprobs = np.full(len(rows), np.nan, np.float32)
        columns = (rows[index], values[index], positions[index])
        tokens[index], logprobs[index], drawn = self._host_draw.choose(copied, *columns)
        reports = self._host_draw.report(copied, drawn, *columns, tokens[index])
        return Sampled.of(tokens, logprobs if values["logprobs"].any() else None, reports)

    def needs_host(self, rows: NDArray[np.int32]) -> bool:
        """Whether a choice for these rows takes or gives more than logits and a token."""
        return bool(self.hosted(rows).any())

    def waits(self, rows: NDArray[np.int32]) -> bool:
        """Whether `sample_ahead` cannot choose for these rows."""
        found = self._table["waits" if self._device_penalties is not None else "hosted"]
        return bool(found[rows].any())

    def hosted(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which rows need what was drawn before, or report more than a token."""
        found: NDArray[np.bool_] = self._table["hosted"][rows]
        return found

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def arrays(
        self,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        masks: RowMasks | None = None,
        masked: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what `sample_ahead` wants on the device, so that it goes there with something else.

        `masked`: the places of rows with masks, where these are not known yet.
        """
        return self._records.arrays(rows, positions, masked if masks is None else masks.places)

    def sample_ahead(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        there: Sequence[torch.Tensor] | None = None,
        masks: RowMasks | None = None,
        last_tokens: torch.Tensor | None = None,
    ) -> Ahead:
        """Sample rows of which none `waits`. Tokens and what is reported of them stay on the device.

        The host waits for nothing. `there` are the `arrays` of these rows; without them they are sent now. `masks` are
        applied to the logits, in place. `last_tokens` i64[all rows] get each row's token. What is counted of the
        drawn tokens is changed last.
        """
        values = self._gather(logits, rows, positions)
        if there is None:
            there = upload_together(self.arrays(rows, positions, masks), logits.device)
        records, lists = there
        worked = values["worked"] | (positions < values["may_stop_at"])
        lists_there = self._records.lists(lists)
        step = RowsAhead(rows, values, positions, worked, records, lists_there, masks, last_tokens)
        return self._device_draw.draw(logits[:, : self._vocab_size], step)

    def report_prompt(
        self, builder: ReportBuilder, row: int, first: int, logits: torch.Tensor, tokens: NDArray[np.int32]
    ) -> None:
        """Add the report that `row` wants of its prompt's `tokens`, which begin at index `first`.

        Its values are the model's own log-softmax, without penalties and temperature.
        """
        builder.add(row, first, logits[:, : self._vocab_size], tokens, self._wanted.get(row, CHOSEN_ONLY))

    def why_bad(self, row: int) -> str:
        """Explain what was wrong with the logits of a bad row."""
        return self._processed.failure(row) or (
            "no token can be chosen for this request: the model's logits have NaN or infinity, or are -inf for all "
            "tokens that its grammar, logit_bias and logits processors leave"
        )

    def _gather(self, logits: torch.Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.void]:
        if not len(rows) == len(positions) == logits.shape[0]:
            raise ValueError(
                f"{logits.shape[0]} rows of logits, {len(rows)} rows and {len(positions)} positions: not equal"
            )
        if logits.shape[1] < self._vocab_size:
            raise ValueError(f"logits have {logits.shape[1]} columns, fewer than vocab_size {self._vocab_size}")
        self._check_rows(rows)
        # An index would take ten times as long.
        return self._table.take(rows)

    def _check_rows(self, rows: NDArray[np.integer]) -> None:
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self._table)):
            outside = (rows < 0) | (rows >= len(self._table))
            raise ValueError(
                f"rows {rows[outside].tolist()} are outside the table: valid are 0 to {len(self._table) - 1}"
            )


def _take(logits: torch.Tensor, index: NDArray[np.intp]) -> torch.Tensor:
    # The whole batch is the common case and must not be copied.
    if len(index) == logits.shape[0]:
        return logits
    return logits[torch.from_numpy(index).to(logits.device)]


def argmax(logits: torch.Tensor) -> NDArray[np.int64]:
    """Return the argmax of each row, or -1 where its logit is not finite: `max` carries a NaN through."""
    top, token = logits.max(dim=-1)
    return np.asarray(torch.where(torch.isfinite(top), token, -1).cpu().numpy())


def with_argmax(tokens: NDArray[np.int64], worked: NDArray[np.bool_], sampled: Sampled | None) -> Sampled:
    """Join the choices of a step: `tokens` (-1: bad), but for the rows `worked`, if any, whose choices are in
    `sampled`."""
    if sampled is None:
        return Sampled.of(tokens)
    logprobs = None
    if sampled.logprobs is not None:
        logprobs = np.full(len(tokens), np.nan, np.float32)
        logprobs[worked] = sampled.logprobs
    drawn = sampled.tokens.astype(np.int64)
    tokens[worked] = drawn if sampled.bad is None else np.where(sampled.bad, -1, drawn)
    return Sampled.of(tokens, logprobs, sampled.reports)
