"""The book of what keys use: a small SQLite file in the run directory that all API processes share.

It has a row for each key and model, and a row for each key with limits. A limit is a bucket: it holds what a minute
allows, and fills again all the time. So limits are exact for the whole server, whichever process a request reaches,
and a process that dies takes nothing along. Knows names and numbers; knows neither requests nor HTTP.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger("tokenyard")

# Most rows: pairs of a key and a model beyond them are written down as one.
MOST_ROWS = 50_000
OTHERS = "others"
_SECONDS = 60.0
# Longest wait for another process's transaction. They take microseconds; a process may be stopped within one, and
# streams stand still while this one waits.
_WAIT_SECONDS = 0.025
# Seconds for which the book is left alone after it could not be used.
REST_SECONDS = 1.0
# Streams that were let in and may be taken up again without being counted: seconds since the last time, how often one
# may, and how many are remembered.
STREAM_SECONDS = 3600.0
MOST_RESUMED = 100
MOST_STREAMS = 10_000
_QUIET_SECONDS = 60.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    key TEXT, model TEXT, requests INTEGER DEFAULT 0, prompt_tokens INTEGER DEFAULT 0,
    cached_tokens INTEGER DEFAULT 0, generation_tokens INTEGER DEFAULT 0, PRIMARY KEY (key, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS buckets (key TEXT PRIMARY KEY, requests REAL, tokens REAL, at REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS streams (
    key TEXT, name TEXT, at REAL, resumed INTEGER DEFAULT 0, PRIMARY KEY (key, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS streams_by_time ON streams (at);
"""


@dataclass
class Use:
    """What a key has used of a model, or a part of it."""

    key: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The tokens that count for a limit."""
        return self.prompt_tokens + self.generation_tokens


@dataclass(frozen=True)
class Limits:
    """What a key may have in a minute; 0: any number."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Level:
    """A bucket: what it holds when it is full, what it holds now, and the seconds until there is enough and it is full.

    After requests that took more than there was, what it holds is below 0.
    """

    limit: int
    left: float
    wait: float
    full: float

    @classmethod
    def of(cls, limit: int, left: float, wanted: float) -> Level:
        rate = limit / _SECONDS
        return cls(limit, left, max(0.0, wanted - left) / rate, max(0.0, limit - left) / rate)


@dataclass(frozen=True)
class Verdict:
    """Whether a request may come in, and the buckets after it, by their names."""

    admitted: bool
    levels: dict[str, Level] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamName:
    """The name of a stream that may be taken up again, and whether this request does so."""

    name: str
    again: bool = False


class _Kept:
    """Goes on without the book where it cannot be used. The log says so at most once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said = float("-inf")
        self._rests_until = float("-inf")

    @property
    def rests(self) -> bool:
        """True for a while after the book could not be used: each attempt would hold up all streams."""
        return self._clock() < self._rests_until

    def __enter__(self) -> None:
        """Nothing is needed."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, sqlite3.Error):
            return False
        self._rests_until = self._clock() + REST_SECONDS
        now = time.monotonic()
        if now - self._said >= _QUIET_SECONDS:
            self._said = now
            log.warning("the book of usage cannot be used: %s; limits of keys do not hold meanwhile", error)
        return True


class Ledger:
    """The book. Where the file cannot be used nothing is refused, and the log says so."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens the book; None: in memory, for one process."""
        self._clock = clock
        self._kept = _Kept(clock)
        self._known: set[tuple[str, str]] = set()
        self._file = self._reader = _opened(":memory:" if path is None else path)
        with self._kept:
            # The file lives as long as the run directory, so no write needs to reach a disk. The write-ahead log keeps
            # it whole when a process is killed within a transaction.
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.executescript(_SCHEMA)
        if path is not None:
            # Its own, because threads read with it: with the log it waits for no writer.
            self._reader = _opened(path)

    def close(self) -> None:
        self._reader.close()
        self._file.close()

    def admit(self, key: str, limits: Limits, stream: StreamName | None = None) -> Verdict:
        """Takes a request from the key's bucket, if there is one left and its tokens are not used up.

        A stream that was let in and is taken up again takes nothing, and is not refused.
        """
        if self._kept.rests:
            return Verdict(True)
        with self._kept, self._transaction():
            requests, tokens, now = self._levels(key, limits)
            again = stream is not None and stream.again and self._take_up(key, stream.name, now)
            admitted = again or ((not limits.requests or requests >= 1) and (not limits.tokens or tokens > 0))
            left = requests - 1 if admitted and not again and limits.requests else requests
            self._put(key, left, tokens, now, limits)
            if stream is not None and admitted and not again:
                self._remember(key, stream.name, now)
            # One who was refused wants one request, or one token, and asks when it is there.
            missing = 0.0 if admitted else 1.0
            levels = {}
            if limits.requests:
                levels["requests"] = Level.of(limits.requests, left, missing)
            if limits.tokens:
                levels["tokens"] = Level.of(limits.tokens, tokens, missing)
            return Verdict(admitted, levels)
        return Verdict(True)

    def add(self, uses: Iterable[Use], limits: Callable[[str], Limits]) -> bool:
        """Writes down what was used, and takes its tokens from the buckets. Returns False where that did not work."""
        if self._kept.rests:
            return False
        with self._kept, self._transaction():
            for use in uses:
                self._add(use)
                own = limits(use.key)
                if own.tokens and use.tokens:
                    requests, tokens, now = self._levels(use.key, own)
                    self._put(use.key, requests, tokens - use.tokens, now, own)
            return True
        return False

    def rows(self) -> list[Use]:
        """What each key has used of each model since the server began, sorted by names. May run in a thread."""
        return self._read("SELECT * FROM usage ORDER BY key, model")

    def largest(self, count: int) -> list[Use]:
        """As many rows, of those that have used most tokens. May run in a thread."""
        order = "prompt_tokens + generation_tokens DESC, key, model"
        return self._read(f"SELECT * FROM usage ORDER BY {order} LIMIT ?", count)

    def _read(self, query: str, *values: int) -> list[Use]:
        with self._kept:
            return [Use(*row) for row in self._reader.execute(query, values).fetchall()]
        return []

    def keep_buckets(self, keys: Collection[str]) -> None:
        """Forgets the buckets of all other keys."""
        with self._kept, self._transaction():
            held = [row[0] for row in self._file.execute("SELECT key FROM buckets")]
            gone = [(key,) for key in held if key not in keys]
            self._file.executemany("DELETE FROM buckets WHERE key = ?", gone)
            self._file.executemany("DELETE FROM streams WHERE key = ?", gone)

    def _remember(self, key: str, name: str, now: float) -> None:
        """Remembers a stream that was let in, and forgets old ones."""
        self._file.execute("DELETE FROM streams WHERE at < ?", (now - STREAM_SECONDS,))
        self._file.execute("INSERT OR REPLACE INTO streams (key, name, at) VALUES (?, ?, ?)", (key, name, now))
        (count,) = self._file.execute("SELECT count(*) FROM streams").fetchone()
        oldest = "SELECT key, name FROM streams ORDER BY at LIMIT ?"
        if count > MOST_STREAMS:
            self._file.execute(f"DELETE FROM streams WHERE (key, name) IN ({oldest})", (count - MOST_STREAMS,))

    def _take_up(self, key: str, name: str, now: float) -> bool:
        """Whether this stream was let in, and has not been taken up too often."""
        changed = self._file.execute(
            "UPDATE streams SET resumed = resumed + 1, at = ? WHERE key = ? AND name = ? AND at >= ? AND resumed < ?",
            (now, key, name, now - STREAM_SECONDS, MOST_RESUMED),
        )
        return changed.rowcount == 1

    def _add(self, use: Use) -> None:
        pair = (use.key, use.model)
        if pair not in self._known:
            found = self._file.execute("SELECT 1 FROM usage WHERE key = ? AND model = ?", pair).fetchone()
            (count,) = self._file.execute("SELECT count(*) FROM usage").fetchone()
            if found is None and count >= MOST_ROWS:
                pair = (OTHERS, OTHERS)
            elif len(self._known) < MOST_ROWS:
                self._known.add(pair)
        self._file.execute(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET requests = requests + "
            "excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, cached_tokens = cached_tokens "
            "+ excluded.cached_tokens, generation_tokens = generation_tokens + excluded.generation_tokens",
            (*pair, use.requests, use.prompt_tokens, use.cached_tokens, use.generation_tokens),
        )

    def _levels(self, key: str, limits: Limits) -> tuple[float, float, float]:
        """What the buckets of a key hold now, and the time. New ones are full; none holds more than a minute allows."""
        now = self._clock()
        row = self._file.execute("SELECT requests, tokens, at FROM buckets WHERE key = ?", (key,)).fetchone()
        requests, tokens, at = row or (None, None, now)
        share = max(0.0, now - at) / _SECONDS
        return _filled(requests, limits.requests, share), _filled(tokens, limits.tokens, share), now

    def _put(self, key: str, requests: float, tokens: float, now: float, limits: Limits) -> None:
        # A bucket without a limit is none: where a limit comes later, it begins full.
        row = (key, requests if limits.requests else None, tokens if limits.tokens else None, now)
        self._file.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)", row)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # Exclusive from the start: then the end cannot find the file taken.
        self._file.execute("BEGIN EXCLUSIVE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise


def _opened(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)


def _filled(level: float | None, limit: int, share: float) -> float:
    """What a bucket holds after this share of a minute."""
    return float(limit) if level is None else min(limit, level + share * limit)
