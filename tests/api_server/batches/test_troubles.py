"""The runner in trouble: poisonous lines, full disks, many batches, and an end in the middle of a write."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api_server import batch_service
from api_server.app import Application
from api_server.batches import lines, runner
from api_server.batches.calls import Answer
from api_server.batches.records import Batch
from api_server.batches.runner import Runner
from api_server.batches.store import Store
from tests.api_server.batches.test_runner import numbered, put, results, run_until, status_of
from tests.api_server.batches.victim import MOST

FULL = OSError(errno.ENOSPC, "no room")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.01)


async def good(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
    return Answer("r", 200, {}, {})


def nested(levels: int) -> Any:
    return json.loads("[" * levels + "]" * levels)


@pytest.mark.parametrize("field", ["input", "metadata"])
async def test_a_line_that_is_nested_too_deep_stops_no_other_key(tmp_path: Path, field: str) -> None:
    store = Store(tmp_path, MOST)
    poisonous = put(store, [{field: nested(300)}], "a")
    fine = put(store, numbered(2), "b")
    await run_until(store, good, lambda: status_of(store, fine) == "completed")
    await run_until(store, good, lambda: status_of(store, poisonous) == "failed")
    (error,) = store.batch("a", poisonous.id).errors
    assert error["line"] == 1
    assert "nested deeper than 200 levels" in error["message"]


async def test_an_error_of_ours_is_the_result_of_its_request(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        if body["input"] == 1:
            raise TypeError("a bug")
        return Answer("r", 200, {}, {})

    batch = put(store, numbered(3))
    await run_until(store, send, lambda: status_of(store, batch) == "completed")
    output, errors = results(store, batch)
    assert len(output) == 2
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("c1", 500)]


@pytest.mark.parametrize("broken", ["{", "[]", '{"id": "batch_x"}'])
async def test_facts_that_cannot_be_read_stop_no_other_batch(tmp_path: Path, broken: str) -> None:
    store = Store(tmp_path, MOST)
    lost = put(store, numbered(1), "a")
    (store.folder_of(lost) / "batch.json").write_text(broken)
    fine = put(store, numbered(2), "b")
    await run_until(store, good, lambda: status_of(store, fine) == "completed")
    assert store.batches("a", "openai") == []


async def test_a_result_that_cannot_be_read_fails_its_batch_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    lost = put(store, numbered(1), "a")
    (store.folder_of(lost) / "output.jsonl").write_text("{\n")
    fine = put(store, numbered(2), "b")
    await run_until(store, good, lambda: status_of(store, fine) == "completed")
    await run_until(store, good, lambda: status_of(store, lost) == "failed")


def test_facts_of_a_later_version_are_read(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    batch = put(store, numbered(1))
    path = store.folder_of(batch) / "batch.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    assert store.batch("t", batch.id) == batch


async def test_a_runner_that_ends_by_an_error_is_logged_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[int] = []
    again = asyncio.Event()

    class Broken:
        leaving = False

        async def run(self) -> None:
            begun.append(1)
            if len(begun) == 1:
                raise TypeError("a bug")
            again.set()

    class Served:
        leaving = False
        router = None

        server = SimpleNamespace(store=Store(tmp_path, MOST))

    monkeypatch.setattr(batch_service, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(batch_service, "runner_of", lambda *_: Broken())
    application: Any = Served()
    served: Application = application
    async with asyncio.timeout(60):
        await batch_service.run_batches(served)
    assert again.is_set()
    assert "batches stand still" in caplog.text


async def test_a_disk_that_is_full_at_the_beginning_makes_no_second_result(tmp_path: Path) -> None:
    class Failing(Store):
        failures = 1

        def save(self, batch: Batch) -> None:
            if batch.status == "in_progress" and self.failures:
                self.failures -= 1
                raise FULL
            super().save(batch)

    asked: list[int] = []

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        asked.append(body["input"])
        return Answer("r", 200, {}, {})

    store = Failing(tmp_path, MOST)
    batch = put(store, numbered(20))
    await run_until(store, send, lambda: status_of(store, batch) == "completed")
    assert store.failures == 0
    assert sorted(asked) == list(range(20))
    output, _ = results(store, batch)
    assert sorted(line["custom_id"] for line in output) == sorted(f"c{i}" for i in range(20))


async def test_a_batch_that_is_cancelled_while_the_disk_is_full_loses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [FULL, FULL]
    append = lines.append

    def failing(path: Path, values: Iterable[Any]) -> None:
        found = list(values)
        if found and failures:
            raise failures.pop()
        append(path, found)

    monkeypatch.setattr(lines, "append", failing)
    sent: list[int] = []

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        sent.append(1)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    store = Store(tmp_path, MOST)
    batch = put(store, numbered(12))

    def done() -> bool:
        if sent:
            store.cancel(batch)
        return status_of(store, batch) == "cancelled"

    await run_until(store, send, done)
    assert not failures
    output, errors = results(store, batch)
    assert output == []
    assert sorted(line["custom_id"] for line in errors) == sorted(f"c{i}" for i in range(12))
    # The disk was full for two attempts, in which no request was sent again.
    assert len(sent) <= 4


async def test_few_batches_are_open_at_a_time_and_keys_take_turns(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    first = [put(store, numbered(1), "a") for _ in range(6)]
    later = put(store, numbered(1), "b")
    opened: list[str] = []
    counts: list[int] = []

    class Watched(Runner):
        def _chosen(self, waiting: Sequence[Batch]) -> list[Batch]:
            chosen = super()._chosen(waiting)
            opened.extend(batch.tenant for batch in chosen)
            counts.append(len(self._jobs) + len(chosen))
            return chosen

    batches = [*first, later]
    watched = Watched(store, good, lambda _: 4)
    await run_until(store, good, lambda: all(status_of(store, b) == "completed" for b in batches), by=watched)
    assert max(counts) == 3
    assert opened == ["a", "b", *"aaaaa"]


async def test_the_lock_is_held_until_the_last_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, MOST)
    batch = put(store, numbered(1))
    writes = threading.Event()
    may_end = threading.Event()
    append = lines.append

    def slow(path: Path, values: Iterable[Any]) -> None:
        found = list(values)
        if found:
            writes.set()
            assert may_end.wait(60)
        append(path, found)

    monkeypatch.setattr(lines, "append", slow)
    task = asyncio.create_task(Runner(store, good, lambda _: 4).run())
    assert await asyncio.to_thread(writes.wait, 60)
    task.cancel()
    await asyncio.wait([task], timeout=0.2)
    with (tmp_path / "lock").open() as lock:
        assert not runner._locked(lock.fileno())
        may_end.set()
        await asyncio.wait([task], timeout=60)
        assert runner._locked(lock.fileno())
    assert [len(part) for part in results(store, batch)] == [1, 0]


async def test_a_batch_that_has_ended_keeps_no_second_name_of_its_files(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    whole = store.room()
    batch = put(store, numbered(8))
    folder = store.folder_of(batch)
    await run_until(store, good, lambda: [path.name for path in folder.iterdir()] == ["batch.json"])
    assert [len(part) for part in results(store, batch)] == [8, 0]
    for file in store.files("t"):
        store.delete_file("t", file.id)
    # All that is left are the facts of the batch.
    assert whole - store.room() == (folder / "batch.json").stat().st_size


def test_a_line_cannot_raise_its_priority(tmp_path: Path) -> None:
    body = {"input": "x", "priority": 0, "timeout": 5, "stream": True}
    (tmp_path / "in").write_text(json.dumps({"custom_id": "a", "body": body}) + "\n")
    (line,) = lines.read_input(tmp_path / "in", "/v1/embeddings")
    assert lines.body_of(tmp_path / "in", line) == {"input": "x", "timeout": 5}
