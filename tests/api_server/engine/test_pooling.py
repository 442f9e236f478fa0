"""One-shot requests of a replica, against a scheduler double on a real socket."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from api_server.engine import health_probe
from api_server.engine.client import EngineClient
from api_server.engine.pooling import PooledSubmission, StreamedSubmission
from api_server.errors import ErrorKind, RequestFailed
from interfaces import (
    ErrorCode,
    PooledValues,
    PoolingContext,
    PoolingTask,
    RequestError,
    SamplingParams,
    SchedulingOptions,
    SharedMemoryArray,
    TextContext,
    Vectors,
    encode,
)
from shared.endpoints import RunDirectory
from tests.api_server.scheduler_double import SchedulerDouble, sums_of


@pytest.fixture
async def engine(double: SchedulerDouble, run_directory: RunDirectory) -> AsyncIterator[EngineClient]:
    double.tasks = ["classify", "embed"]
    double.labels = ["no", "yes"]
    client = EngineClient(run_directory.api_endpoint, "test")
    client.start()
    await until(lambda: client.health().ready)
    yield client
    client.close()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def texts(count: int, task: PoolingTask = PoolingTask.EMBED) -> PoolingContext:
    return PoolingContext.of([[i + 1] * (i % 7 + 1) for i in range(count)], task)


def assert_sums(context: PoolingContext, values: PooledValues) -> None:
    np.testing.assert_array_equal(values.array, sums_of(context).array)
    np.testing.assert_array_equal(values.lengths, np.ones(len(context)))


@pytest.mark.parametrize("count", [1, 2, 7, 2048])
async def test_values_come_in_the_order_of_the_texts(engine: EngineClient, count: int) -> None:
    context = texts(count)
    assert_sums(context, await engine.pool(context))
    assert engine.running == 0


async def test_facts_of_the_model_are_kept_while_a_worker_restarts(
    engine: EngineClient, double: SchedulerDouble
) -> None:
    facts = engine.model
    assert (facts.tasks, facts.labels, facts.vector_width) == (frozenset({"classify", "embed"}), ["no", "yes"], 2)
    double.tasks = []
    double.ready = False
    await until(lambda: not engine.health().ready)
    assert (facts.tasks, facts.labels, facts.vector_width) == (frozenset({"classify", "embed"}), ["no", "yes"], 2)


async def test_what_no_worker_can_do_is_refused_before_it_is_sent(
    engine: EngineClient, double: SchedulerDouble
) -> None:
    with pytest.raises(RequestFailed, match="this model cannot sparse: it can classify, embed") as failed:
        await engine.pool(texts(3, PoolingTask.SPARSE))
    assert failed.value.kind is ErrorKind.INVALID
    submission = engine.submit(TextContext.from_prompt([1], SamplingParams(max_new_tokens=1)))
    _, update = await submission.inbox.next()
    assert update.error is not None
    assert (update.error.code, "cannot generate" in update.error.message) == (ErrorCode.INVALID, True)
    assert double.submits == []


async def test_refusals_have_the_kinds_of_generation(engine: EngineClient, double: SchedulerDouble) -> None:
    for code, kind in (
        (ErrorCode.OVERLOADED, ErrorKind.OVERLOADED),
        (ErrorCode.TOO_LONG, ErrorKind.TOO_LONG),
        (ErrorCode.TIMEOUT, ErrorKind.TIMEOUT),
        (ErrorCode.FAILED, ErrorKind.GENERATION_FAILED),
    ):
        double.refuse = RequestError(code, "because")
        with pytest.raises(RequestFailed, match="because") as failed:
            await engine.pool(texts(3))
        assert failed.value.kind is kind
    assert engine.running == 0


async def test_a_cancelled_call_cancels_its_request(engine: EngineClient, double: SchedulerDouble) -> None:
    double.hold.set()
    call = asyncio.create_task(engine.pool(texts(3)))
    await until(lambda: double.pooling)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: double.cancelled == [double.submits[0].handle])
    assert engine.running == 0


@pytest.mark.slow
async def test_a_restarted_scheduler_gets_the_texts_again(engine: EngineClient, double: SchedulerDouble) -> None:
    double.hold.set()
    context = texts(30)
    call = asyncio.create_task(engine.pool(context, SchedulingOptions(total_seconds=60)))
    await until(lambda: double.pooling)
    double.restart()
    double.hold.clear()
    assert_sums(context, await call)
    first, again = double.submits
    assert (first.again, again.again) == (False, True)
    assert again.handle != first.handle
    assert again.scheduling.total_seconds is not None
    assert again.scheduling.total_seconds < 60


async def test_a_lost_message_makes_all_texts_without_values_be_sent_again(
    engine: EngineClient, double: SchedulerDouble
) -> None:
    double.hold.set()
    context = texts(6)
    call = asyncio.create_task(engine.pool(context))
    await until(lambda: double.pooling)
    first = double.submits[0]
    part = sums_of(context).part(0, 2)
    double.send_raw(encode(Vectors(double.incarnation, first.handle, 0, part, number=0)))
    await until(lambda: engine._open[first.handle].progress == 2)
    # The number shows that a message before this one was lost.
    double.send_raw(encode(Vectors(double.incarnation, first.handle, 2, part, number=2)))
    await until(lambda: len(double.submits) == 2)
    again = double.submits[1].context
    assert isinstance(again, PoolingContext)
    assert again.lengths.tolist() == context.lengths[2:].tolist()
    double.hold.clear()
    assert_sums(context, await call)


async def test_a_server_that_only_pools_is_probed_by_a_text(engine: EngineClient, double: SchedulerDouble) -> None:
    assert await health_probe.problem(engine) == ""
    (submit,) = double.submits
    assert isinstance(submit.context, PoolingContext)
    double.refuse = RequestError(ErrorCode.FAILED, "broken")
    engine._moved = 0.0
    assert await health_probe.problem(engine) == "broken"


def vectors(first: int, values: PooledValues) -> Vectors:
    return Vectors(1, 1, first, values)


async def test_only_missing_texts_are_sent_again_and_all_values_find_their_place() -> None:
    context = texts(10)
    values = sums_of(context)
    submission = PooledSubmission(1, context, SchedulingOptions())
    assert submission.message.context == context
    assert not submission.receive(vectors(2, values.part(2, 4)))
    assert not submission.receive(vectors(7, values.part(7, 8)))
    rest = submission.message.context
    assert isinstance(rest, PoolingContext)
    assert rest.lengths.tolist() == [len(context.texts()[i]) for i in (0, 1, 4, 5, 6, 8, 9)]
    left = sums_of(rest)
    assert not submission.receive(vectors(3, left.part(3, 7)))
    assert submission.receive(vectors(0, left.part(0, 3)))
    submission.finish()
    assert_sums(context, submission.done.result())


async def test_values_that_cannot_be_are_refused() -> None:
    context = texts(4)
    values = sums_of(context)
    submission = PooledSubmission(1, context, SchedulingOptions())
    assert submission.message is not None
    wide = PooledValues(np.zeros((1, 3), np.float32), np.ones(1, np.int32))
    assert not submission.receive(vectors(0, values.part(0, 1)))
    for first, wrong in ((-1, values.part(0, 1)), (3, values.part(0, 2)), (0, values.part(0, 1)), (1, wide)):
        with pytest.raises(ValueError):
            submission.receive(vectors(first, wrong))
    with pytest.raises(ValueError):
        submission.receive(vectors(1, PooledValues(np.zeros((0, 2), np.float32), np.zeros(0, np.int32))))
    assert submission.receive(vectors(1, values.part(1, 4)))


async def test_streamed_values_are_handed_out_in_order_as_they_come() -> None:
    context = texts(4)
    values = sums_of(context)
    submission = StreamedSubmission(1, context, SchedulingOptions())
    assert submission.message.context == context
    assert not submission.receive(vectors(2, values.part(2, 3)))
    reader = submission.texts()
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not submission.receive(vectors(0, values.part(0, 1)))
    found = [await waiting]
    rest = submission.message.context
    assert isinstance(rest, PoolingContext)
    assert rest.lengths.tolist() == [len(context.texts()[i]) for i in (1, 3)]
    left = sums_of(rest)
    assert submission.receive(vectors(0, left))
    submission.finish()
    found += [row async for row in reader]
    np.testing.assert_array_equal(np.concatenate(found), values.array)


async def test_a_stream_that_fails_hands_out_what_it_has_before() -> None:
    context = texts(3)
    submission = StreamedSubmission(1, context, SchedulingOptions())
    assert not submission.receive(vectors(0, sums_of(context).part(0, 1)))
    submission.fail(RequestError(ErrorCode.TIMEOUT, "late"))
    reader = submission.texts()
    np.testing.assert_array_equal(await anext(reader), sums_of(context).array[:1])
    with pytest.raises(RequestFailed, match="late"):
        await anext(reader)


async def test_a_preview_that_is_gone_is_left_out_and_the_image_goes_on() -> None:
    context = texts(1)
    submission = StreamedSubmission(1, context, SchedulingOptions())
    gone = SharedMemoryArray(f"tokenyard-1-1-1-{secrets.token_hex(8)}", (1, 3), np.dtype(np.float32).str)
    one = np.ones(1, np.int32)
    assert not submission.receive(Vectors(1, 1, 0, PooledValues(gone, one), 0, preview=1))
    image = PooledValues(np.ones((1, 3), np.float32), one)
    assert submission.receive(Vectors(1, 1, 0, image, 0))
    assert [number async for number, _ in submission.with_previews()] == [0]
