"""Distributes one message of results to the submissions that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from api_server.engine.open_request import OpenRequest
from api_server.engine.submission import Submission
from interfaces import ErrorCode, Finish, GenerationStatus, RequestError, Results

_STATUS_OF_CODE = {
    Finish.STOP: GenerationStatus.END_OF_SEQUENCE,
    Finish.LENGTH: GenerationStatus.MAXIMUM_LENGTH,
    Finish.CANCELLED: GenerationStatus.CANCELLED,
}


def fit_together(results: Results) -> bool:
    """True when each entry has all its parts."""
    if not len(results.handles) == len(results.tokens) == len(results.finished):
        return False
    if results.logprobs is not None and len(results.logprobs) != len(results.handles):
        return False
    parts = (results.reports, results.hidden)
    return all(part is None or part.consistent for part in parts)


def fan_out(results: Results, waiting: Mapping[int, OpenRequest], forget: Callable[[OpenRequest], object]) -> bool:
    """Gives each entry to the submission of its handle, if that still waits. Returns True if there were tokens.

    Calls `forget` for each submission that ends, before the submission gets its end.
    """
    _add_facts(results, waiting)
    logprobs = results.logprobs.tolist() if results.logprobs is not None else [None] * len(results.handles)
    tokens = results.tokens.tolist()
    columns = zip(results.handles.tolist(), tokens, results.finished.tolist(), logprobs, strict=True)
    for handle, token, finished, logprob in columns:
        submission = waiting.get(handle)
        if submission is None:
            continue  # cancelled here while its token was in flight
        submission.add(token, logprob)
        if finished != Finish.ACTIVE:
            forget(submission)
            if finished == Finish.FAILED:
                submission.fail(results.errors.get(handle, RequestError(ErrorCode.FAILED, "no reason was given")))
            else:
                submission.end(_STATUS_OF_CODE.get(finished, GenerationStatus.CANCELLED))
    return max(tokens, default=-1) >= 0


def _add_facts(results: Results, waiting: Mapping[int, OpenRequest]) -> None:
    """Gives the submissions what comes with or before the tokens."""
    for handle, position, report in results.reports.entries() if results.reports is not None else ():
        if isinstance(submission := waiting.get(handle), Submission):
            submission.report(position, report)
    for handle, position, vector in results.hidden.entries() if results.hidden is not None else ():
        if isinstance(submission := waiting.get(handle), Submission):
            submission.hidden[position] = vector
    for handle, count in results.cached.items():
        if isinstance(submission := waiting.get(handle), Submission):
            submission.context.cached_prefix_length = count
    for handle, (guessed, right) in results.guesses.items():
        if isinstance(submission := waiting.get(handle), Submission):
            submission.guesses = guessed, right
    for handle, names in results.versions.items():
        if isinstance(submission := waiting.get(handle), Submission):
            for first in sorted(names):
                submission.goes_on_with(names[first], first)
    for handle, microseconds in results.queued.items():
        if handle in waiting:
            waiting[handle].queued = microseconds / 1e6
