"""The optional parts of a result: log-probabilities, hidden states, and jump-forward tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from interfaces import HiddenStates, LogprobReports, StepResult, TokenRuns
from model_worker.rows import HiddenPart, PackedStep
from model_worker.sampling.logprobs import ReportBuilder
from model_worker.sampling.sampler import Sampled, SamplerRows


def logprob_reports(
    sampler: SamplerRows, packed: PackedStep, logits: torch.Tensor, sampled: Sampled
) -> LogprobReports | None:
    """Report the step's parts of prompts, and its sampled rows. Logits of prompts follow those of rows."""
    if not packed.prompts:
        return sampled.reports
    builder = ReportBuilder()
    start = len(packed.sampling)
    for part in packed.prompts:
        stop = start + len(part.tokens)
        sampler.report_prompt(builder, part.row, part.first, logits[start:stop], part.tokens)
        start = stop
    found = [reports for reports in (builder.columns(), sampled.reports) if reports is not None]
    return LogprobReports.joined(found)


def hidden_states(parts: list[HiddenPart], vectors: torch.Tensor) -> HiddenStates:
    return HiddenStates(
        owners=np.repeat([part.row for part in parts], [part.count for part in parts]).astype(np.int32),
        positions=np.concatenate([part.first + np.arange(part.count) for part in parts]).astype(np.int32),
        values=vectors.float().cpu().numpy().ravel(),
    )


def with_forced(result: StepResult, forced: dict[int, list[int]]) -> StepResult:
    """Return the result with jump-forward tokens. Rows that failed get none."""
    kept = {row: tokens for row, tokens in forced.items() if row not in result.errors}
    return replace(result, forced=TokenRuns.of(kept)) if kept else result


def with_reports(result: StepResult, reports: LogprobReports | None, hidden: HiddenStates | None) -> StepResult:
    """Return the result with its reports. Rows that failed report nothing."""
    if result.errors:
        failed = list(result.errors)
        if reports is not None:
            reports = reports.select(~np.isin(reports.owners, failed))
        if hidden is not None:
            kept = ~np.isin(hidden.owners, failed)
            hidden = hidden.select(kept) if kept.any() else None
    return replace(result, reports=reports, hidden=hidden)
