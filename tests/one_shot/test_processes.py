"""Texts from an API client through the real scheduler to real workers: equal to transformers, whatever is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from api_server.engine.client import EngineClient
from api_server.engine.embeddings import SocketEmbeddings
from api_server.errors import ErrorKind, RequestFailed
from interfaces import (
    EmbeddingsGenerator,
    PooledValues,
    PoolingContext,
    PoolingTask,
    RequestID,
    SchedulingOptions,
    TextContext,
    sweep_segments,
)
from interfaces.context.tokens import TokenBuffer
from interfaces.wire.shared_memory import DIRECTORY, MESSAGE_THRESHOLD, PREFIX
from tests.model_worker.tiny_models import tiny_model
from tests.one_shot.server import VOCAB, PoolingServer, reference, tiny_bert


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def server(bert: Path, tmp_path: Path) -> Iterator[PoolingServer]:
    with PoolingServer(tmp_path, bert) as server:
        server.start_scheduler()
        server.keep()
        yield server


def random_texts(count: int, longest: int, vocab: int = VOCAB) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng()
    return [rng.integers(0, vocab, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


def contexts(texts: list[NDArray[np.int32]]) -> dict[RequestID, TextContext]:
    made = [TextContext(tokens=TokenBuffer(text.astype(np.int64)), max_length=None) for text in texts]
    return {context.request_id: context for context in made}


def segments(server: PoolingServer) -> set[str]:
    """Those that the server's processes have made."""
    names = {path.name for path in DIRECTORY.glob(f"{PREFIX}*")}
    return {name for name in names if int(name.removeprefix(PREFIX).split("-")[1]) in server.pids}


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def connected(server: PoolingServer) -> EngineClient:
    client = EngineClient(server.run_directory.api_endpoint, "test")
    client.start()
    await until(lambda: client.health().ready)
    return client


def embed(texts: list[NDArray[np.int32]]) -> PoolingContext:
    return PoolingContext.of(texts, PoolingTask.EMBED)


def assert_equal(values: PooledValues, expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(values.array, expected, atol=2e-5)


def test_the_published_generator_gives_an_encoders_vectors(bert: Path, server: PoolingServer) -> None:
    texts = random_texts(40, 100)
    with SocketEmbeddings(server.run_directory.path) as generator:
        assert isinstance(generator, EmbeddingsGenerator)
        generator.wait_until_ready()
        batch = contexts(texts)
        outputs = generator.encode(batch)
        assert list(outputs) == list(batch)
        found = np.stack([output.embeddings for output in outputs.values()])
        np.testing.assert_allclose(found, reference(bert, texts), atol=2e-5)
        assert generator.encode({}) == {}
        with pytest.raises(RequestFailed, match="a text may have 160") as failed:
            generator.encode(contexts([np.ones(161, np.int32)]))
        assert failed.value.kind is ErrorKind.TOO_LONG
    with SocketEmbeddings(server.run_directory.path, dimensions=8) as generator:
        generator.wait_until_ready()
        (short,) = generator.encode(contexts(texts[:1])).values()
        cut = found[0][:8]
        np.testing.assert_allclose(short.embeddings, cut / np.linalg.norm(cut), atol=2e-5)


def test_the_published_generator_gives_a_decoders_vectors(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    texts = random_texts(20, 60, 190)
    with PoolingServer(run, model, task="embed", dtype="float32") as server, SocketEmbeddings(run) as generator:
        server.start_scheduler()
        server.start_worker()
        generator.wait_until_ready()
        found = np.stack([output.embeddings for output in generator.encode(contexts(texts)).values()])
    np.testing.assert_allclose(found, reference(model, texts, last=True), atol=2e-5)


async def test_every_answer_survives_the_death_of_workers_and_scheduler(bert: Path, server: PoolingServer) -> None:
    texts = random_texts(2048, 150)
    few = random_texts(5, 120)
    expected = reference(bert, texts)
    expected_few = reference(bert, few)
    client = await connected(server)
    try:
        bulk = asyncio.create_task(client.pool(embed(texts)))
        small = [asyncio.create_task(client.pool(embed(few))) for _ in range(10)]

        def runs() -> bool:
            # A fast machine may have done it before a status says so.
            return bulk.done() or (client.status is not None and client.status.running > 0)

        for kill in ("worker 0", "scheduler", "worker 0"):
            await asyncio.sleep(0.3)
            if bulk.done():  # a fast machine
                assert_equal(await bulk, expected)
                bulk = asyncio.create_task(client.pool(embed(texts)))
                await until(runs)
            await asyncio.to_thread(server.kill, kill)
            if kill == "scheduler":
                server.start_scheduler()
            small += [asyncio.create_task(client.pool(embed(few))) for _ in range(5)]
            await until(lambda: client.health().ready)
        async with asyncio.timeout(90):
            assert_equal(await bulk, expected)
            for call in small:
                assert_equal(await call, expected_few)
        assert client.running == 0
    finally:
        client.close()


async def test_large_values_leave_nothing_in_shared_memory(bert: Path, server: PoolingServer) -> None:
    texts = random_texts(300, 150)
    context = PoolingContext.of(texts, PoolingTask.EMBED_TOKENS)
    client = await connected(server)
    try:
        expected = await client.pool(context)
        assert expected.array.nbytes > 2 * MESSAGE_THRESHOLD
        assert expected.lengths.tolist() == [len(text) for text in texts]
        await until(lambda: not segments(server))
        call = asyncio.create_task(client.pool(PoolingContext.joined([context] * 20)))
        abandoned = asyncio.create_task(client.pool(PoolingContext.joined([context] * 20)))
        # The files come and go, so the kill falls where it falls.
        await asyncio.sleep(0.1)
        assert not call.done()
        await asyncio.to_thread(server.kill, "worker 0")
        abandoned.cancel()
        async with asyncio.timeout(100):
            found = await call
        np.testing.assert_allclose(found.array, np.concatenate([expected.array] * 20), atol=2e-5)
    finally:
        client.close()
    await asyncio.to_thread(server.close)
    sweep_segments()
    assert not segments(server)


async def test_short_requests_do_not_wait_for_a_bulk_job(bert: Path, server: PoolingServer) -> None:
    client = await connected(server)
    try:
        query = random_texts(1, 16)
        expected = reference(bert, query)
        await client.pool(embed(query))
        bulk = asyncio.create_task(client.pool(embed([np.ones(150, np.int32)] * 20_000)))
        await until(lambda: client.status is not None and client.status.running)
        for _ in range(20):
            assert_equal(await client.pool(embed(query)), expected)
        assert not bulk.done()
        bulk.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bulk
        await until(lambda: client.status is not None and not client.status.running)
    finally:
        client.close()


async def test_limits_of_time_and_of_the_queue(bert: Path, tmp_path: Path) -> None:
    with PoolingServer(tmp_path, bert, max_queued=3) as server:
        server.start_scheduler()
        server.start_worker()
        client = await connected(server)
        try:
            await asyncio.to_thread(server.kill, "worker 0")
            await until(lambda: client.status is not None and not client.status.ready)
            calls = [
                asyncio.create_task(client.pool(embed(random_texts(1, 5)), SchedulingOptions(queue_seconds=seconds)))
                for seconds in (0.5, 60, 60, 60)
            ]
            with pytest.raises(RequestFailed, match="could not be started within its time limit of") as late:
                await calls[0]
            assert late.value.kind is ErrorKind.TIMEOUT
            done, _ = await asyncio.wait(calls[1:], return_when=asyncio.FIRST_COMPLETED, timeout=90)
            (refused,) = [call.exception() for call in done]
            assert isinstance(refused, RequestFailed)
            assert refused.kind is ErrorKind.OVERLOADED
            server.start_worker()
            await asyncio.wait(calls, timeout=60)
            assert sum(call.exception() is None for call in calls) == 2
        finally:
            client.close()
