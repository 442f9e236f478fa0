"""A batch on a real server: all processes are killed in the middle of it, and another server goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.kills import kill_together
from tests.system.server import Server

REQUESTS = 240
LINES: list[dict[str, Any]] = [
    {
        "custom_id": f"c{i}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"Hello {i}", "max_tokens": 16, "temperature": 0},
    }
    for i in range(REQUESTS)
]
FLAGS = ["--dtype", "float32", "--max-running", "4", "--kv-memory", "2MB", "--batch-dir"]


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def results_in(folder: Path) -> dict[str, Any]:
    """The whole lines of the output, by their ids. A line that was not written to its end has no result in it."""
    texts = [path.read_text() for path in folder.glob("tenants/*/batches/*/output.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_killed_in_the_middle_each_request_has_one_result(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    with Server(model, [*FLAGS, str(folder)], tmp_path / "first") as server:
        client = client_of(server)
        data = "\n".join(map(json.dumps, LINES)).encode()
        file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        server.wait_for("the first results", 60, lambda: results_in(folder))
        # Or it might be over before all its processes are killed.
        server.post("/pause_generation", {"mode": "in_place"})
        kill_together([psutil.Process(server.process.pid), *server.children()])
    before = results_in(folder)
    assert 0 < len(before) < REQUESTS
    with Server(model, [*FLAGS, str(folder)], tmp_path / "second") as server:
        client = client_of(server)
        server.wait_for("the end of the batch", 120, lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.request_counts is not None
        assert (ended.request_counts.total, ended.request_counts.completed) == (REQUESTS, REQUESTS)
        assert ended.output_file_id is not None
        output = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
        assert sorted(line["custom_id"] for line in output) == sorted(line["custom_id"] for line in LINES)
        # What was there has stayed as it was, and what came later is what the server answers.
        assert {line["custom_id"]: line for line in output if line["custom_id"] in before} == before
        later = next(line for line in output if line["custom_id"] not in before)
        asked = server.post("/v1/completions", LINES[int(later["custom_id"][1:])]["body"])
        assert later["response"]["body"]["choices"] == asked["choices"]
