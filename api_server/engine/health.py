"""The health of the engine, judged by the scheduler's last Status and its silence since."""

from __future__ import annotations

from dataclasses import dataclass

from interfaces import Status

# The engine counts as stuck when requests run and no worker has completed a step for this long.
STALL_SECONDS = 120.0


@dataclass(frozen=True)
class Health:
    """Health of the engine: alive, ready, and the reason when it is not."""

    alive: bool
    ready: bool
    reason: str


def judge(status: Status | None, silence: float, stale_seconds: float, was_ready: bool) -> Health:
    """Alive: the scheduler speaks and, if requests run, steps complete. Ready: it would serve a request now.

    `silence` are the seconds since it was heard, which must be below `stale_seconds`. Loading counts as not alive (as
    with other servers, whose users poll /health until it is 200); a worker that is being restarted later does not
    (`was_ready`), so that no orchestrator kills a server that is recovering.
    """
    if status is None:
        return Health(False, False, f"starting: no word from the scheduler for {silence:.0f} s yet")
    if silence > stale_seconds:
        return Health(False, False, f"the scheduler has been silent for {silence:.0f} s")
    stall = min((w.seconds_since_step for w in status.workers), default=0.0) if status.running else 0.0
    if stall > STALL_SECONDS:
        return Health(False, False, f"no step has been completed for {stall:.0f} s while {status.running} requests run")
    return Health(was_ready, status.ready, status.reason if not status.ready else "")


def steps(status: Status) -> int:
    """The steps and batches that all workers have completed."""
    return sum(worker.steps for worker in status.workers)
