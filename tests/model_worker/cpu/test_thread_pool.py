"""The threads of a pool may be kept from jobs, and get them again, while jobs are in flight."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba import njit

from model_worker.cpu.threads import (
    ALL_THREADS,
    OVER,
    Job,
    ThreadPool,
    arrived_last,
    begin,
    phase_of,
    take,
    wait,
)

PHASES = 20
PIECES = 30


@njit(nogil=True)
def _count_up(core: int, counter: Any, cores: int, number: int, done: Any, owners: Any) -> None:
    """Count in `done` how often each piece of each job was done after the job before; -1 where it came too early."""
    phase = phase_of(counter)
    while phase < PHASES:
        count = 0
        first, many = take(counter, phase, PIECES, 2, core, cores)
        while many > 0:
            for piece in range(first, first + many):
                early = number > 0 and done[number - 1].min() < PHASES
                done[number, piece] += -1000 if early else 1
                owners[number, core] += 1
            count += many
            first, many = take(counter, phase, PIECES, 2, core, cores)
        if count > 0 and arrived_last(counter, count, PIECES):
            phase += 1
            begin(counter, OVER if phase == PHASES else phase)
        else:
            wait(counter, phase)
        phase = phase_of(counter)


@pytest.fixture(autouse=True)
def _every_thread_afterwards() -> Iterator[None]:
    yield
    ThreadPool.most_threads = ALL_THREADS


def test_a_thread_that_is_kept_from_jobs_has_no_part_in_them() -> None:
    pool = ThreadPool(3)
    done, owners = np.zeros((1, PIECES), np.int64), np.zeros((1, 3), np.int64)
    ThreadPool.most_threads = 1
    pool.run(_count_up, 3, 0, done, owners)
    assert (done == PHASES).all()
    assert owners.tolist() == [[PHASES * PIECES, 0, 0]]


def test_jobs_run_in_order_while_the_number_of_threads_changes() -> None:
    """A thread that comes back begins no job before those in flight are over, though it had no part in them."""
    jobs = 60
    pool = ThreadPool(4)
    done, owners = np.zeros((jobs, PIECES), np.int64), np.zeros((jobs, 4), np.int64)
    flying: deque[Job] = deque()
    for number in range(jobs):
        ThreadPool.most_threads = (1, 4, 2, ALL_THREADS, 3)[number % 5]
        flying.append(pool.begin(_count_up, 4, number, done, owners))
        if len(flying) > number % 3:
            flying.popleft().finish()
    while flying:
        flying.popleft().finish()
    assert (done == PHASES).all()


def test_threads_beside_steps_are_nice_and_are_kept_from_no_job() -> None:
    known = set(threading.enumerate())
    pool = ThreadPool(3, niceness=7)
    threads = [thread for thread in threading.enumerate() if thread not in known]
    done, owners = np.zeros((1, PIECES), np.int64), np.zeros((1, 3), np.int64)
    ThreadPool.most_threads = 1
    job = pool.begin(_count_up, 3, 0, done, owners)
    # The caller takes no part: the others do all of it.
    while phase_of(job._counter) != OVER:
        assert all(thread.is_alive() for thread in threads)
    job.finish()
    assert (done == PHASES).all()
    assert owners[0, 0] == 0
    # One of them may have done it all before the other has begun.
    nice = {max(7, os.getpriority(os.PRIO_PROCESS, 0))}
    while {os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in threads} != nice:
        assert all(thread.is_alive() for thread in threads)
    assert len(threads) == 2
