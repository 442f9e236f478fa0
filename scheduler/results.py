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
    for row, (guessed, right) in new.guesses.items():
        owner = worker.rows.sequences[row]
        if owner is not None and row in new.rows:
            owner.guesses = owner.guesses[0] + guessed, owner.guesses[1] + right
            requests.outbox.guesses(int(worker.rows.replica[row]), owner.handle, *owner.guesses)
    if new.following:
        new = _up_to_the_end(worker, new)
    if new.reports is not None:
        _publish_reports(requests, worker, new.reports)
    if new.hidden is not None:
        _publish_hidden(requests, worker, new.hidden)
    if len(new.rows):
        following = {row: (int(worker.rows.version[row]), run) for row, run in new.following.items()}
        _append(requests, worker, new)
        if following:
            _append_following(requests, worker, following, new.following_logprobs)
    for row, text in new.failed.items():
        sequence = worker.rows.sequences[row]
        if sequence is None:
            continue
        worker.distrust(row)
        if row in new.again and not sequence.failed_alone:
            sequence.failed_alone = True
        else:
            requests.fail(sequence, RequestError(ErrorCode.FAILED, text))
    for row in new.again:
        if worker.rows.sequences[row] is None:
            continue  # it failed
        sequence = worker.remove(row)
        sequence.preemptions += 1
        requests.preempt(sequence, f"worker {worker.hello.index} had no memory for a pass")


def _append(requests: OpenRequests, worker: Worker, new: NewTokens) -> None:
    """Append and publish one token for each row, then end the sequences that are done."""
    table = worker.rows
    rows = new.rows
    version = requests.version
    lengths = []
    # The one loop over all tokens of a server: it looks things up once.
    for row, token in zip(rows.tolist(), new.tokens.tolist(), strict=True):
        sequence = table.sequence(row)
        if sequence.version != version:
            requests.publish_version(sequence, int(table.replica[row]))
        tokens = sequence.context.tokens
        tokens.advance_with_token(token)
        lengths.append(len(tokens))
        if sequence.queued_us >= 0:
            requests.publish_placement(sequence, int(table.replica[row]))
    requests.streams.append_logprobs(table, rows, new.logprobs)
    finished = np.where(np.array(lengths) >= table.limit[rows], _LENGTH, _ACTIVE)
    finished[table.hits_stop(rows, new.tokens)] = _STOP
    requests.outbox.tokens(table.replica[rows], table.handle[rows], new.tokens, finished, new.logprobs)
    ended = finished != _ACTIVE
    for row, code in zip(rows[ended].tolist(), finished[ended].tolist(), strict=True):
        requests.finish(table.sequence(row), code)


def _append_following(
    requests: OpenRequests,
    worker: Worker,
    following: dict[int, tuple[int, NDArray[np.int32]]],
    logprobs: dict[int, NDArray[np.float32]],
) -> None:
    """Append tokens that follow the sampled ones, one for each row at a time.

    `following` has the version of each row and its tokens. A row whose owner has ended meanwhile is left out.
    """
    version = worker.rows.version
    for i in range(max(len(run) for _, run in following.values())):
        left = [row for row, (owner, run) in following.items() if i < len(run) and version[row] == owner]
        if left:
            tokens = np.array([following[row][1][i] for row in left], np.int32)
            known = [row in logprobs and i < len(logprobs[row]) for row in left]
            column = [logprobs[row][i] if has else np.nan for row, has in zip(left, known, strict=True)]
            _append(
                requests,
                worker,
                NewTokens(np.array(left, np.int32), tokens, np.array(column, np.float32) if any(known) else None),
            )


def _up_to_the_end(worker: Worker, new: NewTokens) -> NewTokens:
    """The result without the tokens, and the reports, that come after the end of a sequence."""
    table = worker.rows
    following = dict(new.following)
    # The last position of each row that has following tokens.
    last: dict[int, int] = {}
    for row, token in zip(new.rows.tolist(), new.tokens.tolist(), strict=True):
        if row not in following:
            continue
        known = len(table.sequence(row).tokens)
        run = np.concatenate([[token], following[row]])[: int(table.limit[row]) - known]
        stops = np.flatnonzero(np.isin(run, table.stop_ids[row]))
        run = run[: stops[0] + 1] if len(stops) else run
        last[row] = known + len(run) - 1
        following[row] = run[1:].astype(np.int32)
    reports = new.reports
    if reports is not None:
        pairs = zip(reports.owners.tolist(), reports.positions.tolist(), strict=True)
        reports = reports.select(np.array([position <= last.get(owner, position) for owner, position in pairs]))
    kept = {row: run for row, run in following.items() if len(run)}
    return replace(new, following=kept, reports=reports)


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
