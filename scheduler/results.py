"""The update from a step's result: tokens are appended and published, and sequences at their end are ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from interfaces import ErrorCode, Finish, HiddenStates, LogprobReports, RequestError
from scheduler.in_flight import NewTokens
from scheduler.open_requests import OpenRequests
from scheduler.workers import Worker

_ACTIVE = np.int8(Finish.ACTIVE)
_STOP = np.int8(Finish.STOP)
_LENGTH = np.int8(Finish.LENGTH)


def update(requests: OpenRequests, worker: Worker, new: NewTokens) -> None:
    """Update the sequences of `worker` from the result of one step."""
    if new.reports is not None:
        _publish_reports(requests, worker, new.reports)
    if new.hidden is not None:
        _publish_hidden(requests, worker, new.hidden)
    if len(new.rows):
        following = {row: (int(worker.rows.version[row]), run) for row, run in new.following.items()}
        _append(requests, worker, new)
        if following:
            _append_following(requests, worker, following)
    for row, text in new.failed.items():
        sequence = worker.rows.sequences[row]
        if sequence is not None:
            requests.fail(sequence, RequestError(ErrorCode.FAILED, text))


def _append(requests: OpenRequests, worker: Worker, new: NewTokens) -> None:
    """Append and publish one token for each row, then end the sequences that are done."""
    table = worker.rows
    rows = new.rows
    sequences = [table.sequence(row) for row in rows.tolist()]
    for sequence, token in zip(sequences, new.tokens.tolist(), strict=True):
        sequence.context.tokens.advance_with_token(token)
        if sequence.queued_us >= 0:
            requests.publish_placement(sequence, int(table.replica[sequence.row]))
    requests.streams.append_logprobs(table, rows, new.logprobs)
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    finished = np.where(lengths >= table.limit[rows], _LENGTH, _ACTIVE)
    finished[table.hits_stop(rows, new.tokens)] = _STOP
    requests.outbox.tokens(table.replica[rows], table.handle[rows], new.tokens, finished, new.logprobs)
    ended = finished != _ACTIVE
    for row, code in zip(rows[ended].tolist(), finished[ended].tolist(), strict=True):
        requests.finish(table.sequence(row), code)


def _append_following(
    requests: OpenRequests, worker: Worker, following: dict[int, tuple[int, NDArray[np.int32]]]
) -> None:
    """Append tokens that follow the sampled ones, one for each row at a time.

    `following` has the version of each row and its tokens. A row whose owner has ended meanwhile is left out.
    """
    version = worker.rows.version
    for i in range(max(len(run) for _, run in following.values())):
        left = [row for row, (owner, run) in following.items() if i < len(run) and version[row] == owner]
        if left:
            tokens = np.array([following[row][1][i] for row in left], np.int32)
            _append(requests, worker, NewTokens(np.array(left, np.int32), tokens, None))


def _publish_reports(requests: OpenRequests, worker: Worker, reports: LogprobReports) -> None:
    """Publish log-probabilities under the handles of their requests."""
    table = worker.rows
    rows = reports.owners
    for row, position in zip(rows.tolist(), reports.positions.tolist(), strict=True):
        sequence = table.sequences[row]
        if sequence is not None and position < sequence.prompt_len:
            sequence.next_report = max(sequence.next_report, position + 1)
    requests.streams.append_reports(table, reports)
    requests.outbox.reports(table.replica[rows], replace(reports, owners=table.handle[rows]))


def _publish_hidden(requests: OpenRequests, worker: Worker, hidden: HiddenStates) -> None:
    """Publish hidden states under the handles of their requests."""
    table = worker.rows
    rows = hidden.owners
    for row, position in zip(rows.tolist(), hidden.positions.tolist(), strict=True):
        sequence = table.sequences[row]
        if sequence is not None:
            sequence.next_hidden = max(sequence.next_hidden, position + 1)
    requests.outbox.hidden(table.replica[rows], hidden.owned_by(table.handle[rows]))
