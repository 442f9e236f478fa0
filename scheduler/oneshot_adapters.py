"""Adapters of texts that take one forward pass: which of them a worker may be sent, and which adapter it reads next.

The texts of an adapter that a worker has not read wait. Workers read adapters in the order of their requests'
priorities, and of one priority in the order in which they came. Where one has no room yet, requests for others that
come after it in this order wait, too, so that it gets room; requests for the model itself go on. Knows adapters and
requests. Does not know batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from interfaces import ErrorCode, PoolingContext, RequestError, TextContext
from scheduler.adapter import Adapter
from scheduler.oneshot_request import OneShotRequest, kind_of
from scheduler.workers import Worker


def kinds_of(worker: Worker, wanted: Sequence[Adapter]) -> Collection[str]:
    """Return the kinds of texts that a worker may be sent now, and let it read adapters for which others wait.

    `wanted` are the adapters for which texts wait, the first that is to be read before others.
    """
    tasks = worker.hello.tasks
    held = worker.adapters
    held.awaited.clear()
    if not wanted:
        return tasks
    kinds = set(tasks)
    for adapter in wanted:
        if held.problem(adapter):
            continue
        if not held.has_room(adapter):
            break
        held.load(adapter)
        held.awaited.add(adapter.handle)
        if held.has_read(adapter):
            held.used_now(adapter)
            kinds.update(kind_of(task, adapter) for task in tasks)
    return kinds


def unusable(
    requests: Iterable[OneShotRequest], wanted: Sequence[Adapter], workers: Iterable[Worker]
) -> list[tuple[OneShotRequest, RequestError]]:
    """Return the requests for those of the `wanted` adapters that no worker can use, with the reason.

    Without workers there are none.
    """
    able = [worker for worker in workers if worker.pools]
    reasons: dict[Adapter, str] = {}
    for adapter in wanted if able else ():
        problems = [worker.adapters.problem(adapter) for worker in able]
        if all(problems):
            reasons[adapter] = problems[0]
    if not reasons:
        return []
    return [
        (request, RequestError(ErrorCode.FAILED, reasons[request.adapter]))
        for request in requests
        if request.adapter in reasons
    ]


def gone(context: TextContext | PoolingContext) -> RequestError:
    """Return the error of a request whose adapter is not here any more."""
    text = f"the adapter {context.adapter!r} was unloaded, or has another content now: ask again"
    return RequestError(ErrorCode.INVALID, text)
