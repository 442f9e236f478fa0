"""The runner of batches: each request has one result, whatever is killed; order, cancellation, expiry, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api_server.batches import lines, runner
from api_server.batches.calls import Answer
from api_server.batches.lines import WrongInput
from api_server.batches.records import Batch, StoredFile, file_id_of, new_batch_id
from api_server.batches.runner import Runner, Send
from api_server.batches.store import Store
from tests.api_server.batches.victim import MOST, answer

ENDPOINT = "/v1/embeddings"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.01)


def put(store: Store, bodies: list[Any], tenant: str = "t", seconds: int = 3600) -> Batch:
    """A batch with these bodies, whose ids are their numbers."""
    name, content, _ = store.begin(tenant, MOST)
    for i, body in enumerate(bodies):
        line = {"custom_id": f"c{i}", "method": "POST", "url": ENDPOINT, "body": body}
        content.write(json.dumps(line).encode() + b"\n")
    store.commit(tenant, StoredFile(name, "in.jsonl", "batch", content.tell(), 0), content)
    now = int(time.time())
    batch = Batch(new_batch_id("batch_"), tenant, "openai", ENDPOINT, name, now, now + seconds)
    return store.create(batch, store.content(tenant, name))


def numbered(count: int) -> list[Any]:
    return [{"input": i} for i in range(count)]


def results(store: Store, batch: Batch) -> tuple[list[Any], list[Any]]:
    """The results, from the batch's folder, or from the files that it has made."""
    return _results(store, batch, "output.jsonl", "output"), _results(store, batch, "errors.jsonl", "error")


def _results(store: Store, batch: Batch, name: str, part: str) -> list[Any]:
    folder = store.folder_of(batch)
    with contextlib.suppress(FileNotFoundError):
        if (folder / name).exists():
            return list(lines.read_results(folder / name))
    return list(lines.read_results(folder.parent.parent / "files" / f"{file_id_of(batch, part)}.data"))


async def run_until(
    store: Store,
    send: Send,
    done: Callable[[], Any],
    room: Callable[[int], int] = lambda _: 4,
    by: Runner | None = None,
) -> None:
    """Runs batches until a condition holds."""
    task = asyncio.create_task((by or Runner(store, send, room)).run())
    deadline = time.monotonic() + 60
    try:
        while not await asyncio.to_thread(done):
            assert not task.done(), task
            assert time.monotonic() < deadline, "the runner has not come so far"
            await asyncio.sleep(0.005)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def status_of(store: Store, batch: Batch) -> str:
    return store.batch(batch.tenant, batch.id).status


async def test_each_request_has_its_result(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    batches = [put(store, numbered(count), tenant) for count, tenant in ((30, "a"), (5, "b"), (1, "b"))]
    await run_until(store, answer, lambda: all(status_of(store, b) == "completed" for b in batches))
    for batch, count in zip(batches, (30, 5, 1), strict=True):
        found = store.batch(batch.tenant, batch.id)
        wrong = (count + 6) // 7
        assert (found.total, found.completed, found.failed) == (count, count - wrong, wrong)
        output, errors = results(store, batch)
        assert sorted(line["custom_id"] for line in output + errors) == sorted(f"c{i}" for i in range(count))
        assert all(line["response"]["body"]["tenant"] == batch.tenant for line in output + errors)
        assert {line["response"]["status_code"] for line in errors} == {400}
        assert [found.times[name] for name in ("in_progress", "finalizing", "completed")]
        assert found.error_file_id is not None
        content = store.content(batch.tenant, found.error_file_id).read_text()
        assert [json.loads(line) for line in content.splitlines()] == errors


@pytest.mark.slow
def test_killed_at_any_moment_each_request_still_has_one_result(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    count = 250
    batch = put(store, numbered(count))
    command = [sys.executable, "-m", "tests.api_server.batches.victim", str(tmp_path)]
    for _ in range(4):
        left = count - sum(map(len, results(store, batch)))
        if left < 9:
            break  # on a busy machine the process has gone on for longer before it died
        # Fewer answers than there are requests without a result.
        answers = random.randrange(1, left // 3)
        ended = subprocess.run([*command, str(answers)], cwd=ROOT, timeout=120)
        assert ended.returncode == -signal.SIGKILL
    with subprocess.Popen([*command, "0"], cwd=ROOT) as process:
        deadline = time.monotonic() + 120
        while status_of(store, batch) != "completed":
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    output, errors = results(store, batch)
    assert sorted(line["custom_id"] for line in output + errors) == sorted(f"c{i}" for i in range(count))
    found = store.batch("t", batch.id)
    assert (found.total, found.completed + found.failed) == (count, count)


async def test_a_second_runner_waits_for_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    asked: list[int] = []

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        asked.append(body["input"])
        return await answer(tenant, path, body, seconds)

    batch = put(store, numbered(40))
    second = asyncio.create_task(Runner(store, send, lambda _: 4).run())
    await run_until(store, send, lambda: status_of(store, batch) == "completed")
    second.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await second
    assert sorted(asked) == list(range(40))


async def test_requests_that_begin_alike_run_together(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    order: list[str] = []

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        order.append(body["prompt"][0])
        return Answer("r", 200, {}, {})

    prompts = [f"{random.choice('abc')}{i}" for i in range(30)]
    batch = put(store, [{"prompt": prompt} for prompt in prompts])
    await run_until(store, send, lambda: status_of(store, batch) == "completed", room=lambda _: 1)
    assert order == sorted(prompt[0] for prompt in prompts)


@pytest.mark.slow
async def test_a_request_that_cannot_be_served_now_comes_again(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    tries: list[int] = []

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        tries.append(body["input"])
        if tries.count(body["input"]) == 1:
            if body["input"] == 2:
                raise OSError("a bug")
            return Answer("r", (429, 503)[body["input"]], {}, None)
        return Answer("r", 200, {}, {})

    batch = put(store, numbered(3))
    await run_until(store, send, lambda: status_of(store, batch) == "completed")
    assert sorted(tries) == [0, 0, 1, 1, 2, 2]
    assert [len(part) for part in results(store, batch)] == [3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_that_is_broken_off_says_so_for_each_request(tmp_path: Path, status: str) -> None:
    store = Store(tmp_path, MOST)

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        if body["input"] > 2:
            await asyncio.Event().wait()
        return Answer("r", 200, {}, {})

    batch = put(store, numbered(9), seconds=3600 if status == "cancelled" else 2)

    def done() -> bool:
        if status == "cancelled" and len(results(store, batch)[0]) == 3:
            store.cancel(batch)
        return status_of(store, batch) == status

    await run_until(store, send, done)
    output, errors = results(store, batch)
    assert sorted(line["custom_id"] for line in output + errors) == [f"c{i}" for i in range(9)]
    unanswered = [line for line in errors if line["response"] is None]
    assert {line["error"]["code"] for line in unanswered} == {f"batch_{status}"}
    found = store.batch("t", batch.id)
    assert found.total == 9
    assert getattr(found, status) == len(unanswered) >= 6
    assert ("cancelling" in found.times) == (status == "cancelled")


async def test_a_full_folder_stops_new_requests(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    batch = put(store, numbered(3))
    begun: list[float] = []

    def has_waited() -> bool:
        if not begun and status_of(store, batch) == "in_progress":
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() > begun[0] + 0.5

    await run_until(store, answer, has_waited)
    assert results(store, batch) == ([], [])
    await run_until(Store(tmp_path, MOST), answer, lambda: status_of(store, batch) == "completed")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "has no requests"),
        ("{", 1, "not valid JSON"),
        ("[]", 1, "must be a JSON object"),
        ('{"body": {}}', 1, "custom_id must be a text"),
        ('{"custom_id": "a", "body": 5}', 1, "body must be an object"),
        ('{"custom_id": "a", "body": {}, "method": "GET"}', 1, "method must be POST, got 'GET'"),
        ('{"custom_id": "a", "body": {}, "url": "/v1/x"}', 1, "url must be /v1/embeddings"),
        ('{"custom_id": "a", "body": {}}\n\n{"custom_id": "a", "body": {}}', 3, "that of line 1, too"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(WrongInput) as wrong:
        lines.read_input(tmp_path / "in", ENDPOINT)
    assert wrong.value.errors[0]["line"] == line
    assert message in wrong.value.errors[0]["message"]


async def test_a_batch_with_wrong_lines_fails_as_a_whole(tmp_path: Path) -> None:
    store = Store(tmp_path, MOST)
    batch = put(store, [{"input": 1}, 5])
    await run_until(store, answer, lambda: status_of(store, batch) == "failed")
    assert [error["line"] for error in store.batch("t", batch.id).errors] == [2]


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    lines.append(path, [{"custom_id": str(i), "text": "x" * 70_000} for i in range(3)])
    whole = path.read_bytes()
    for torn in (b"", b"{", b'{"custom_id": "9", "text": "' + b"y" * 200_000):
        path.write_bytes(whole + torn)
        assert len(list(lines.read_results(path))) == 3
        lines.mend(path)
        assert path.read_bytes() == whole
    path.write_bytes(b"{" * 100)
    lines.mend(path)
    assert path.read_bytes() == b""
