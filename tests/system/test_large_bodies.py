"""Bodies within the limit of bytes that would take an API process its time and memory: refused, and nobody notices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.system.server import Server

COUNT = 1 << 20
STREAM = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}

BODIES: dict[str, tuple[str, Callable[[], str]]] = {
    "messages": ("/v1/chat/completions", lambda: listed("messages", ['{"role":"user","content":"x"}'] * COUNT)),
    "tools": (
        "/v1/messages",
        lambda: listed("tools", [f'{{"name":"f{i}","input_schema":{{}}}}' for i in range(COUNT)]),
    ),
    "token ids": ("/generate", lambda: listed("input_ids", ["1"] * 8 * COUNT)),
    "prompts": ("/v1/completions", lambda: listed("prompt", ['"a"'] * 4 * COUNT)),
    "unknown objects": ("/v1/responses", lambda: listed("nothing", ['{"a":1}'] * 2 * COUNT)),
    "brackets": ("/vertex", lambda: "[" * 16 * COUNT),
    "a text": ("/v1/completions", lambda: listed("prompt", [f'"{"[{word}, " * 4 * COUNT}"'])),
}


def listed(name: str, items: list[str]) -> str:
    return f'{{"{name}":[{",".join(items)}],"max_tokens":1}}'


def streamed(server: Server) -> str:
    found = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:])["choices"][0]["text"])
    assert line in ("", "data: [DONE]")
    return "".join(found)


def highest_memory(pid: int) -> int:
    """Bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def refused(server: Server, path: str, body: str) -> dict[str, Any]:
    response = httpx.post(server.url + path, content=body.encode(), timeout=120)
    assert response.status_code in (400, 422), response.text
    assert len(response.text) < 1000
    found: dict[str, Any] = response.json()
    return found


def test_bodies_of_countless_items_harm_nobody(server: Server) -> None:
    alone = streamed(server)
    silent = server.log.read_text().count("was silent")
    api_server = server.child("api_server").pid
    before, largest = highest_memory(api_server), 0
    with ThreadPoolExecutor() as pool:
        for path, make in BODIES.values():
            body = make()
            largest = max(largest, len(body))
            beside = pool.submit(streamed, server)
            assert refused(server, path, body)
            assert beside.result() == alone
    assert server.log.read_text().count("was silent") == silent
    # The body twice, while it is put together, and the values of one that is small enough to be parsed.
    assert highest_memory(api_server) - before < 3 * largest + (256 << 20)
