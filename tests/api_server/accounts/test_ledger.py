"""The book of usage: exact sums and exact limits for several processes, and a server that goes on without it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.accounts import ledger
from api_server.accounts.ledger import Ledger, Limits, StreamName, Use

MANY = Limits(requests=300, tokens=10**9)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_minute_has_as_many_requests_as_it_may(tmp_path: Path) -> None:
    clock = Clock()
    book = Ledger(tmp_path / "book", clock)
    limits = Limits(requests=3)
    verdicts = [book.admit("a", limits) for _ in range(4)]
    assert [verdict.admitted for verdict in verdicts] == [True, True, True, False]
    assert [round(verdict.levels["requests"].left) for verdict in verdicts] == [2, 1, 0, 0]
    assert verdicts[-1].levels["requests"].wait == pytest.approx(20)
    assert book.admit("b", limits).admitted
    clock.now += 19.9
    assert not book.admit("a", limits).admitted
    clock.now += 0.2
    assert book.admit("a", limits).admitted
    clock.now += 10_000
    assert [book.admit("a", limits).admitted for _ in range(4)] == [True, True, True, False]


def test_tokens_that_were_taken_too_many_are_paid_back_by_waiting() -> None:
    clock = Clock()
    book = Ledger(None, clock)
    limits = Limits(tokens=600)
    assert book.admit("a", limits).admitted
    assert book.add([Use("a", "m", 1, 500, 100, 700)], lambda _: limits)
    refused = book.admit("a", limits)
    # 1,200 tokens were taken of 600, and ten come each second.
    assert not refused.admitted
    assert refused.levels["tokens"].left == pytest.approx(-600)
    assert refused.levels["tokens"].wait == pytest.approx(60.1)
    clock.now += 60.2
    assert book.admit("a", limits).admitted


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 9), st.integers(0, 9)), max_size=30
    )
)
def test_rows_are_the_sums(added: list[tuple[str, str, int, int]]) -> None:
    book = Ledger(None)
    for key, model, prompt, generated in added:
        assert book.add([Use(key, model, 1, prompt, 0, generated)], lambda _: Limits())
    wanted: dict[tuple[str, str], tuple[int, int, int]] = {}
    for key, model, prompt, generated in added:
        requests, prompts, tokens = wanted.get((key, model), (0, 0, 0))
        wanted[key, model] = (requests + 1, prompts + prompt, tokens + generated)
    found = {(use.key, use.model): (use.requests, use.prompt_tokens, use.generation_tokens) for use in book.rows()}
    assert found == wanted
    book.close()


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_ROWS", 4)
    book = Ledger(None)
    book.add([Use(f"k{i}", "m", 1) for i in range(10)], lambda _: Limits())
    book.add([Use("k0", "m", 1), Use("k9", "m", 1)], lambda _: Limits())
    rows = {use.key: use.requests for use in book.rows()}
    assert rows == {"k0": 2, "k1": 1, "k2": 1, "k3": 1, ledger.OTHERS: 7}


def test_buckets_of_keys_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "book", Clock())
    limits = Limits(requests=1)
    assert [book.admit(key, limits).admitted for key in ("a", "b", "a")] == [True, True, False]
    book.keep_buckets({"b"})
    assert [book.admit(key, limits).admitted for key in ("a", "b")] == [True, False]


def test_a_stream_that_was_let_in_is_taken_up_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_RESUMED", 3)
    clock = Clock()
    book = Ledger(tmp_path / "book", clock)
    other = Ledger(tmp_path / "book", clock)
    limits = Limits(requests=1, tokens=10)
    # A stream that was never let in is a request like others.
    assert book.admit("a", limits, StreamName("s", again=True)).admitted
    book.add([Use("a", "m", 1, 50)], lambda _: limits)
    assert not book.admit("a", limits, StreamName("t")).admitted
    assert not book.admit("a", limits, StreamName("t", again=True)).admitted
    assert not book.admit("a", limits, StreamName("s")).admitted
    again = [other.admit("a", limits, StreamName("s", again=True)) for _ in range(4)]
    assert [verdict.admitted for verdict in again] == [True, True, True, False]
    assert round(again[0].levels["requests"].left) == 0
    # Not that of another key, and not for ever.
    assert book.admit("b", Limits(requests=1)).admitted
    assert not book.admit("b", Limits(requests=1), StreamName("s", again=True)).admitted


def test_streams_are_forgotten_in_time_and_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_STREAMS", 2)
    clock = Clock()
    book = Ledger(tmp_path / "book", clock)
    for name in "pqr":
        clock.now += 1
        assert book.admit("a", Limits(requests=3), StreamName(name)).admitted
    assert _streams(tmp_path / "book") == {"q", "r"}
    clock.now += 1
    assert book.admit("a", Limits(requests=3), StreamName("q", again=True)).admitted
    clock.now += 1
    assert book.admit("a", Limits(requests=60), StreamName("s")).admitted
    # The one that was used last is not the oldest.
    assert _streams(tmp_path / "book") == {"q", "s"}
    clock.now += ledger.STREAM_SECONDS + 1
    assert book.admit("a", Limits(requests=3), StreamName("new")).admitted
    assert _streams(tmp_path / "book") == {"new"}


def test_a_limit_that_comes_later_begins_full(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "book", Clock())
    assert book.admit("a", Limits(tokens=100)).admitted
    assert book.add([Use("a", "m", 1, 30)], lambda _: Limits(tokens=100))
    both = book.admit("a", Limits(requests=2, tokens=100))
    assert both.admitted
    assert {name: round(level.left) for name, level in both.levels.items()} == {"requests": 1, "tokens": 70}


def test_a_book_that_is_taken_is_left_alone_for_a_second(tmp_path: Path) -> None:
    clock = Clock()
    book = Ledger(tmp_path / "book", clock)
    limits = Limits(requests=1)
    assert book.admit("a", limits).admitted
    holder = sqlite3.connect(tmp_path / "book", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert book.admit("a", limits).admitted
    holder.execute("ROLLBACK")
    # It is free again, and yet it is not asked: nothing waits for it.
    assert book.admit("a", limits) == ledger.Verdict(True)
    assert not book.add([Use("a", "m", 1)], lambda _: limits)
    clock.now += ledger.REST_SECONDS + 0.1
    assert not book.admit("a", limits).admitted
    assert book.add([Use("a", "m", 1)], lambda _: limits)


def test_the_largest_rows_are_chosen_by_the_book(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "book")
    book.add([Use("a", "m", 9, 1, 0, 1), Use("b", "m", 1, 5), Use("c", "m", 1, 0, 9, 7)], lambda _: Limits())
    assert [use.key for use in book.largest(2)] == ["c", "b"]
    with ThreadPoolExecutor(1) as thread:
        assert [use.key for use in thread.submit(book.rows).result()] == ["a", "b", "c"]


def _streams(path: Path) -> set[str]:
    file = sqlite3.connect(path)
    names = {row[0] for row in file.execute("SELECT name FROM streams")}
    file.close()
    return names


def _take(path: Path, wanted: int, results: Any) -> None:
    """Asks until so many requests were booked, and puts how many were admitted and written down."""
    # The clock stands still, so that the bucket does not fill, and no time passes in which the book is left alone.
    ledger.REST_SECONDS = 0.0
    book = Ledger(path, Clock())
    admitted = 0
    written = 0
    booked = 0
    while booked < wanted:
        verdict = book.admit("a", MANY)
        # One that could not be booked says nothing of the limit: its process was too late, and asks anew.
        if verdict.levels:
            booked += 1
            admitted += verdict.admitted
        if book.add([Use("a", "m", 1, 2, 1, 3)], lambda _: MANY):
            written += 1
    book.close()
    results.put((admitted, written))


def _hold(path: Path, ready: Any) -> None:
    file = sqlite3.connect(path, isolation_level=None)
    file.execute("BEGIN EXCLUSIVE")
    file.execute("UPDATE usage SET requests = 0")
    ready.put(os.getpid())
    signal.pause()


def test_processes_share_limits_and_sums_and_a_killed_one_harms_neither(tmp_path: Path) -> None:
    path = tmp_path / "book"
    # A connection of SQLite must not be carried into a fork.
    Ledger(path).close()
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    processes = [context.Process(target=_take, args=(path, 150, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    book = Ledger(path, Clock())
    rows = book.rows()
    book.close()
    assert sum(admitted for admitted, _ in found) == MANY.requests
    assert rows[0].requests == sum(written for _, written in found)
    holder = context.Process(target=_hold, args=(path, results))
    holder.start()
    results.get(timeout=60)
    clock = Clock()
    book = Ledger(path, clock)
    assert book.admit("a", MANY).admitted
    assert not book.add([Use("a", "m", 1)], lambda _: MANY)
    holder.kill()
    holder.join(60)
    clock.now += ledger.REST_SECONDS + 0.1
    assert book.rows() == rows
    assert book.add([Use("a", "m", 1)], lambda _: MANY)
    assert book.rows()[0].requests == rows[0].requests + 1
