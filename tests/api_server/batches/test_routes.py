"""Files and batches over HTTP, with OpenAI's and Anthropic's own clients, and the tenants' walls."""

from __future__ import annotations

import errno
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest

from api_server.batches import disk, lines, runner
from api_server.dialects.anthropic import batches as anthropic_batches
from api_server.text.tokenizer import Tokenizer
from shared.access_keys import digest_of
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, encode, serving
from tests.api_server.dialects.test_openai import USER
from tests.api_server.scheduler_double import SchedulerDouble

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
KEYS = ("one", "two")


@pytest.fixture
def keeping(
    double: SchedulerDouble,
    run_directory: RunDirectory,
    tokenizer: Tokenizer,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LiveServer]:
    """A server with a folder for batches, and two keys."""
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.02)
    keys = ",".join(map(digest_of, KEYS))
    settings = Settings(model=str(model_directory), batch_dir=str(tmp_path / "batches"), api_key=keys)
    with serving(double, run_directory, tokenizer, settings) as live:
        yield live


@pytest.fixture
def client(keeping: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{keeping.url}/v1", api_key=KEYS[0], max_retries=0)


@pytest.fixture
def messenger(keeping: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=keeping.url, api_key=KEYS[0], max_retries=0)


def upload(client: openai.OpenAI, *bodies: Any, url: str = CHAT) -> Any:
    given = [{"custom_id": f"c{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    text = "\n".join(map(json.dumps, given))
    return client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch")


def until(live: LiveServer, found: Callable[[], Any], *statuses: str) -> Any:
    live.double.wait(lambda: found().status in statuses, 60)
    return found()


def lines_of(client: openai.OpenAI, name: str | None) -> list[Any]:
    assert name is not None
    return [json.loads(line) for line in client.files.content(name).text.splitlines()]


def test_a_batch_from_file_to_file(keeping: LiveServer, client: openai.OpenAI) -> None:
    good = {"messages": USER, "max_tokens": 20, "stream": True, "priority": 0}
    file = upload(client, good, {"messages": USER, "top_p": 3}, good | {"model": "tiny-chat"})
    assert (file.purpose, file.filename, file.status) == ("batch", "in.jsonl", "processed")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "1"}
    )
    assert batch.status in ("validating", "in_progress", "completed")
    ended = until(keeping, lambda: client.batches.retrieve(batch.id), "completed")
    assert ended.metadata == {"night": "1"}
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    output = lines_of(client, ended.output_file_id)
    assert sorted(line["custom_id"] for line in output) == ["c0", "c2"]
    for line in output:
        response = line["response"]
        assert (response["status_code"], line["error"]) == (200, None)
        assert response["body"]["choices"][0]["message"]["content"] == "Hello, world!"
    (error,) = lines_of(client, ended.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("c1", 400)
    assert error["response"]["body"]["error"]["param"] == "top_p"
    priorities = {submit.scheduling.priority for submit in keeping.double.submits}
    assert priorities == {-1000}
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert {each.id for each in client.files.list()} == {file.id, ended.output_file_id, ended.error_file_id}
    # A file is a name of its content: without it the batch still has its own.
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(file.id)


def test_a_key_sees_its_own_alone(keeping: LiveServer, client: openai.OpenAI) -> None:
    other = openai.OpenAI(base_url=f"{keeping.url}/v1", api_key=KEYS[1], max_retries=0)
    file = upload(client, {"messages": USER})
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert list(other.files.list()) == []
    assert list(other.batches.list()) == []
    for refused in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    for name in ("..", "..%2f..%2fsettings", "file-x", "file-" + "0" * 32):
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        assert httpx.get(f"{keeping.url}/v1/files/{name}/content", headers=headers).status_code == 404


def test_cancelling(keeping: LiveServer, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    keeping.double.answer = lambda _: encode(tokenizer, "x")
    keeping.double.hold.set()
    file = upload(client, *[{"messages": USER}] * 20)
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    keeping.double.wait(lambda: keeping.double.submits)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = until(keeping, lambda: client.batches.retrieve(batch.id), "cancelled")
    assert {line["error"]["code"] for line in lines_of(client, ended.error_file_id)} == {"batch_cancelled"}
    keeping.double.wait(lambda: keeping.state.engine.running == 0)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.batches.cancel(batch.id)


@pytest.mark.slow
def test_other_requests_come_first(keeping: LiveServer, client: openai.OpenAI) -> None:
    """While another request is there, one request of the batch at most is under way."""
    keeping.double.hold.set()
    keeping.double.cached = 0
    connection = httpx.Client(base_url=keeping.url, headers={"authorization": f"Bearer {KEYS[1]}"})
    with connection.stream("POST", CHAT, json={"messages": USER, "stream": True}) as stream:
        keeping.double.wait(lambda: keeping.double.submits)
        status = keeping.state.engine
        keeping.double.wait(lambda: status.status is not None and status.status.running >= 1)
        file = upload(client, *[{"messages": USER}] * 6)
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        keeping.double.wait(lambda: len(keeping.double.submits) == 2)
        keeping.double.hold.clear()
        stream.read()
    until(keeping, lambda: client.batches.retrieve(batch.id), "completed")
    assert len(keeping.double.submits) == 7


def test_batches_of_messages(keeping: LiveServer, messenger: anthropic.Anthropic) -> None:
    requests: Any = [
        {"custom_id": f"m{i}", "params": {"model": "tiny-chat", "max_tokens": 20, "messages": USER}} for i in range(3)
    ]
    requests[1]["params"]["max_tokens"] = 0
    batches = messenger.messages.batches
    batch = batches.create(requests=requests)
    keeping.double.wait(lambda: batches.retrieve(batch.id).processing_status == "ended", 60)
    ended = batches.retrieve(batch.id)
    assert (ended.request_counts.succeeded, ended.request_counts.errored, ended.request_counts.processing) == (2, 1, 0)
    assert ended.ended_at is not None
    found = {each.custom_id: each.result for each in batches.results(batch.id)}
    assert {name: result.type for name, result in found.items()} == {
        "m0": "succeeded",
        "m1": "errored",
        "m2": "succeeded",
    }
    for name in ("m0", "m2"):
        result = found[name]
        assert result.type == "succeeded"
        assert [getattr(block, "text", None) for block in result.message.content] == ["Hello, world!"]
    assert [each.id for each in batches.list()] == [batch.id]
    batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="custom_id is 'm0' again"):
        batches.create(requests=[requests[0], requests[0]])


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": ("x", b"x")}}, "file is missing"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": ("x", b"x")}}, "purpose must be batch, got 'fine-tune'"),
        ({"files": {"file": ("x", b"x")}}, "purpose must be batch, got ''"),
        (
            {"data": {"purpose": "batch", "expires_after[seconds]": "5"}, "files": {"file": ("x", b"x")}},
            "expires_after[seconds] must be 3600 to 2592000, got '5'",
        ),
        ({"content": b"--x\r\nbroken", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "the form is"),
        (
            {
                "data": {"purpose": "batch", "expires_after[seconds]": "000000003600" + "9" * 30},
                "files": {"file": b"x"},
            },
            "expires_after[seconds] must be 3600 to 2592000",
        ),
        (
            {"content": b"x", "headers": {"content-type": f"multipart/form-data; boundary={'b' * 300}"}},
            "the form's boundary cannot be used",
        ),
        ({"json": {}}, "the content type must be multipart/form-data"),
    ],
)
def test_a_wrong_form_is_named_and_leaves_nothing(keeping: LiveServer, form: Any, error: str) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"} | form.pop("headers", {})
    response = httpx.post(keeping.url + "/v1/files", headers=headers, **form)
    assert response.status_code in (400, 415), response.text
    assert error in response.json()["error"]["message"]
    left = [path.name for path in Path(keeping.state.settings.batch_dir).rglob("*") if path.is_file()]
    assert set(left) <= {"lock"}
    assert httpx.get(keeping.url + "/v1/files", headers=headers).json()["data"] == []


def test_a_full_disk_is_named_and_leaves_nothing(
    keeping: LiveServer, client: openai.OpenAI, messenger: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on the device")

    monkeypatch.setattr(disk, "replacing", full)
    with pytest.raises(openai.BadRequestError, match="no room for files"):
        upload(client, {"messages": USER})
    request: Any = {"custom_id": "a", "params": {"model": "tiny-chat", "max_tokens": 20, "messages": USER}}
    with pytest.raises(anthropic.BadRequestError, match="no room for files"):
        messenger.messages.batches.create(requests=[request])
    left = [path.name for path in Path(keeping.state.settings.batch_dir).rglob("*") if path.is_file()]
    assert set(left) <= {"lock"}


@pytest.mark.parametrize("metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "" for i in range(17)}])
def test_metadata_is_small(client: openai.OpenAI, metadata: dict[str, str]) -> None:
    file = upload(client, {"messages": USER})
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata=metadata)


async def test_results_are_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    response = {"status_code": 200, "request_id": "r", "body": {"text": "x" * 100}}
    written = [{"custom_id": f"c{i}", "response": response, "error": None} for i in range(20)]
    lines.append(tmp_path / "output.jsonl", written)
    lines.append(tmp_path / "errors.jsonl", [{"custom_id": "e", "response": None, "error": {"code": "batch_expired"}}])
    threads: set[int] = set()

    def read(path: Path) -> Iterator[Any]:
        for line in lines_read(path):
            threads.add(threading.get_ident())
            yield line

    lines_read = lines.read_results
    monkeypatch.setattr(lines, "read_results", read)
    monkeypatch.setattr(anthropic_batches, "_PIECE", 1000)
    pieces = [piece async for piece in anthropic_batches._results(tmp_path)]
    assert 1 < len(pieces) < 20
    found = [json.loads(line) for line in b"".join(pieces).splitlines()]
    assert [line["custom_id"] for line in found] == [*(f"c{i}" for i in range(20)), "e"]
    assert threads
    assert threading.get_ident() not in threads


def test_a_server_without_a_folder_says_so(live: LiveServer) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches")):
        response = httpx.request(method, live.url + path)
        assert response.status_code == 404
        assert "--batch-dir" in response.json()["error"]["message"]
    refused = httpx.get(live.url + "/v1/messages/batches", headers={"anthropic-version": "2023-06-01"})
    assert (refused.status_code, refused.json()["type"]) == (404, "error")
