"""Arrays in shared memory: whatever dies, and whenever, a sweep leaves /dev/shm as it was."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from interfaces.wire import shared_memory
from interfaces.wire.codec import WireError, msgpack_numpy_decoder, msgpack_numpy_encoder
from interfaces.wire.shared_memory import (
    DIRECTORY,
    MESSAGE_THRESHOLD,
    PREFIX,
    Segments,
    SharedMemoryArray,
    SharedMemoryError,
    mapped,
    sweep_segments,
)

LONG = "TOKENYARD_TEST_LONG" in os.environ
"""Images of the usual size; takes minutes."""
ARRAYS = 10_000
ROUNDS = 200 if LONG else 20
SHAPE = (3, 336, 336) if LONG else (3, 32, 32)
OPEN_REQUESTS = 100
"""More than are on their way, which `PIPE_BYTES` bound."""
PIPE_BYTES = 4096


def segments() -> set[str]:
    return {path.name for path in DIRECTORY.glob(f"{PREFIX}*")}


family: set[int] = {os.getpid()}
"""This process and all that it has forked: other runs of these tests may be going on beside this one."""


def ours() -> set[str]:
    return {name for name in segments() if any(f"-{pid}-" in name for pid in family)}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = ours()
    yield
    assert ours() <= before


@pytest.fixture
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_memory, "_last_warning", -1e9)
    shared_memory._watermark.cache_clear()
    yield
    shared_memory._watermark.cache_clear()


def forked(work: Callable[[], None]) -> int:
    """Pid of a child that does `work` and ends without any clean-up of the parent's."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    family.add(pid)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def small_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read, write


def produce(pipe: int, count: int) -> None:
    """Sends arrays of one number each; a request ends OPEN_REQUESTS later, whether its array was decoded or not."""
    encoder = msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=1)
    alive: list[SharedMemoryArray] = []
    for i in range(count):
        wire = encoder(np.full(SHAPE, i, np.float32))
        alive += encoder.segments.take()
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, struct.pack("<I", len(wire)) + wire)
        encoder.segments.release(alive[:-OPEN_REQUESTS])
        del alive[:-OPEN_REQUESTS]
    os._exit(0)  # without the clean-up that an orderly end would do


def consume(pipe: int, results: int) -> None:
    """Reports how many arrays came whole; those of ended requests are errors, never wrong numbers."""
    decode = msgpack_numpy_decoder(NDArray[np.float32], ipc_peer=True)
    stream = os.fdopen(pipe, "rb", buffering=0)
    for i in range(ARRAYS):
        header = stream.read(4)
        if len(header) < 4:
            return
        wire = stream.read(*struct.unpack("<I", header))
        try:
            array = decode(wire)
        except WireError:
            continue
        assert array.shape == SHAPE
        assert (array == i).all()
        os.write(results, b".")


@pytest.mark.slow
def test_random_kills_on_either_side_leave_nothing() -> None:
    before, rng = ours(), random.Random(random.getrandbits(64))
    received = 0
    for _ in range(ROUNDS):
        read, write = small_pipe()
        results_read, results_write = os.pipe()

        def producer(ours: int = write, theirs: int = read) -> None:
            os.close(theirs)
            produce(ours, ARRAYS // ROUNDS)

        def consumer(ours: int = read, theirs: int = write, results: int = results_write) -> None:
            os.close(theirs)
            consume(ours, results)

        children = [forked(producer), forked(consumer)]
        for descriptor in (read, write, results_write):
            os.close(descriptor)
        if received:
            time.sleep(rng.uniform(0, 0.5 if LONG else 0.1))
        else:  # until one array has come, or no round would show that any does
            assert select.select([results_read], [], [], 60)[0]
        os.kill(rng.choice(children), signal.SIGKILL)
        statuses = [ended(child) for child in children]
        assert set(statuses) <= {0, -signal.SIGKILL}, statuses
        sweep_segments()
        assert ours() == before
        with os.fdopen(results_read, "rb") as results:
            received += len(results.read())
    assert received > 0, "every round was killed before its first array"


def test_ten_thousand_arrays_between_two_processes() -> None:
    before = ours()
    read, write = small_pipe()
    results_read, results_write = os.pipe()

    def producer() -> None:
        os.close(read)
        produce(write, ARRAYS)

    def consumer() -> None:
        os.close(write)
        os.close(results_read)
        consume(read, results_write)

    children = [forked(producer), forked(consumer)]
    for descriptor in (read, write, results_write):
        os.close(descriptor)
    with os.fdopen(results_read, "rb") as results:
        assert len(results.read()) == ARRAYS
    assert [ended(child) for child in children] == [0, 0]
    # Another server of this machine may sweep as well.
    assert len(ours() - before) <= OPEN_REQUESTS
    sweep_segments()
    assert ours() == before


def test_a_sweep_takes_only_what_dead_owners_left() -> None:
    book = Segments()
    living = book.share(np.arange(5))
    assert living is not None
    namespace, pid, start, _ = living.name.removeprefix(PREFIX).split("-")
    of_another_start = f"{PREFIX}{namespace}-{pid}-{int(start) - 1}-{'0' * 16}"
    of_no_process = f"{PREFIX}{namespace}-{2**22 + 1}-{start}-{'0' * 16}"
    of_another_namespace = f"{PREFIX}1-{pid}-1-{'0' * 16}"
    foreign = f"{PREFIX}notes.txt"
    for name in (of_another_start, of_no_process, of_another_namespace, foreign):
        (DIRECTORY / name).write_bytes(b"x")
    try:
        assert sweep_segments() >= 0
        assert not {of_another_start, of_no_process} & segments()
        assert {living.name, of_another_namespace, foreign} <= segments()
    finally:
        for name in (of_another_namespace, foreign):
            (DIRECTORY / name).unlink()
        book.release_all()


def test_a_zombie_owns_nothing() -> None:
    def work() -> None:
        book = Segments()
        assert book.share(np.arange(5)) is not None
        os.kill(os.getpid(), signal.SIGKILL)

    zombie = forked(work)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    assert any(f"-{zombie}-" in name for name in segments())
    assert sweep_segments() >= 1
    assert not any(f"-{zombie}-" in name for name in segments())
    assert ended(zombie) == -signal.SIGKILL


def test_an_orderly_end_releases_everything() -> None:
    code = (
        "import numpy as np; from interfaces.wire.codec import msgpack_numpy_encoder; "
        "encoder = msgpack_numpy_encoder(True, 1); encoder(np.arange(9)); print(encoder.segments.take()[0].name)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip().startswith(PREFIX)
    assert done.stdout.strip() not in segments()


def test_a_book_that_goes_takes_its_segments_with_it_but_not_from_a_forked_child() -> None:
    book = Segments()
    segment = book.share(np.arange(5))
    assert segment is not None
    finalizer = book._finalizer
    assert ended(forked(lambda: finalizer() or None)) == 0
    assert segment.name in segments()
    array = segment.open()
    del book
    assert segment.name not in segments()
    assert array.tolist() == [0, 1, 2, 3, 4], "who has opened it keeps it"


def test_readers_do_not_see_each_others_changes() -> None:
    book = Segments()
    segment = book.share(np.arange(5))
    assert segment is not None
    mine, other = segment.open(writable=True), segment.open()
    mine[0] = 99
    assert other[0] == segment.open()[0] == 0
    assert not other.flags.writeable
    assert os.stat(DIRECTORY / segment.name).st_mode & 0o777 == 0o600


def test_a_segment_that_is_not_what_it_should_be_is_refused(tmp_path: Path) -> None:
    book = Segments()
    segment = book.share(np.arange(5))
    assert segment is not None
    with pytest.raises(SharedMemoryError, match="has 40 bytes, not 48"):
        SharedMemoryArray(segment.name, (6,), "<i8").open()
    (tmp_path / "secret").write_bytes(bytes(40))
    (DIRECTORY / segment.name).unlink()
    (DIRECTORY / segment.name).symlink_to(tmp_path / "secret")
    with pytest.raises(SharedMemoryError, match="cannot be opened"):
        segment.open()


def test_a_full_shared_memory_means_inline_and_one_warning(
    fresh_warnings: None, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=1)
    array = np.arange(10_000)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = segments()
    # The write fails in the middle, as on a full file system.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with caplog.at_level(logging.WARNING, "tokenyard"):
            wires = [encoder(array) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert segments() == before
    assert len(caplog.records) == 1
    assert "travels inline" in caplog.text
    for wire in wires:
        assert msgpack_numpy_decoder(np.ndarray)(wire).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("variable", "value", "shared", "warning"),
    [
        ("TOKENYARD_SHM_WATERMARK", "0.5", True, ""),
        ("MODULAR_MAX_SHM_WATERMARK", "0.5", True, ""),
        ("TOKENYARD_SHM_WATERMARK", "0", False, "inline"),
        ("MODULAR_MAX_SHM_WATERMARK", "0.0", False, "inline"),
        ("TOKENYARD_SHM_WATERMARK", "much", True, "must be a number"),
        ("TOKENYARD_SHM_WATERMARK", "2", True, "must be a number"),
        ("TOKENYARD_SHM_WATERMARK", "1e-12", False, "no room"),
    ],
)
def test_the_watermark(
    variable: str,
    value: str,
    shared: bool,
    warning: str,
    fresh_warnings: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING, "tokenyard"):
        assert (Segments().share(np.arange(100)) is not None) == shared
    assert warning in caplog.text
    assert bool(caplog.records) == bool(warning)


def test_empty_arrays_travel_inline() -> None:
    book = Segments()
    assert book.share(np.empty((0, 3))) is None
    assert len(book) == 0


def test_a_segment_goes_with_its_last_holder() -> None:
    book, large = Segments(), np.arange(MESSAGE_THRESHOLD // 8)
    held = book.hold(large)
    assert isinstance(held, SharedMemoryArray)
    assert book.hold(held) is held
    book.release([held])
    assert held.name in segments()
    assert mapped(held).tolist() == large.tolist()
    mine = book.give_back(held)
    book.release([held])
    assert held.name not in segments()
    assert mapped(mine).tolist() == large.tolist()
    assert isinstance(mine, np.ndarray)
    assert book.hold(large[1:]) is not None
    assert isinstance(book.hold(large[1:].copy()), np.ndarray), "below the threshold it stays what it is"
    assert mapped(large) is large
    assert book.take() == []
    other = Segments().hold(large)
    assert isinstance(other, SharedMemoryArray)
    assert book.hold(other) is other
    book.release([other])
