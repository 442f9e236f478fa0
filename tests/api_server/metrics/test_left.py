"""A client that leaves while its request is read: received once and cancelled once, whatever is asked of the model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

from api_server.body.bodies import LIGHT
from api_server.dialects.tei import routes
from api_server.generation import preparation
from api_server.pixels import painting as painting_module
from api_server.pooling import pooling, ranking
from api_server.speech import speaking as speaking_module
from tests.api_server.conftest import LiveServer
from tests.api_server.metrics.test_collector import scrape, value
from tests.api_server.pixels.conftest import painter, painting
from tests.api_server.pooling.conftest import classifier, classifying, embedder, embedding, reranker, reranking, serve
from tests.api_server.speech.conftest import speaker, speaking

__all__ = [
    "classifier",
    "classifying",
    "embedder",
    "embedding",
    "painter",
    "painting",
    "reranker",
    "reranking",
    "serve",
    "speaker",
    "speaking",
]


class Reading:
    """Reads for as long as the test wants: in the event loop, or in the thread of large bodies."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    async def in_loop(self, *_: Any, **__: Any) -> None:
        self.has_begun.set()
        await asyncio.Event().wait()

    def in_thread(self, *_: Any, **__: Any) -> None:
        self.has_begun.set()
        self.may_end.wait(60)


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.may_end.set()


@pytest.mark.parametrize(
    ("served", "module", "name", "path", "body"),
    [
        ("live", preparation, "prepare", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("live", preparation, "prepare", "/generate_stream", {"inputs": "x"}),
        ("embedding", pooling, "read_texts", "/v1/embeddings", {"input": ["the fox"]}),
        ("embedding", ranking, "read_texts", "/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("reranking", ranking, "read_pairs", "/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("classifying", routes, "_sequences", "/predict", {"inputs": "x"}),
        ("speaking", speaking_module, "sentences_of", "/v1/audio/speech", {"input": "hello there"}),
        ("painting", painting_module, "context_of", "/v1/images/generations", {"prompt": "a train"}),
    ],
)
def test_it_is_counted_once(
    served: str,
    module: ModuleType,
    name: str,
    path: str,
    body: dict[str, Any],
    reading: Reading,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = request.getfixturevalue(served)
    live: LiveServer = server if isinstance(server, LiveServer) else server.live
    in_loop = asyncio.iscoroutinefunction(getattr(module, name))
    monkeypatch.setattr(module, name, reading.in_loop if in_loop else reading.in_thread)
    # A body of this size is read in a thread.
    connection = sent(live, path, json.dumps(body) + " " * (2 * LIGHT))
    assert reading.has_begun.wait(60)
    connection.close()
    requests = "tokenyard_requests_total"
    live.double.wait(lambda: value(scrape(live), requests, route=path, outcome="cancelled"))
    found = scrape(live)
    assert {key: count for key, count in found.items() if key[0] == requests} == {
        (requests, (("outcome", "cancelled"), ("route", path))): 1
    }
    assert value(found, "tokenyard_requests_received_total", route=path) == 1
    assert not live.double.submits


def sent(live: LiveServer, path: str, body: str) -> socket.socket:
    """The connection of a request that was sent."""
    target = urlsplit(live.url)
    connection = socket.create_connection((target.hostname, target.port or 0), timeout=90)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection
