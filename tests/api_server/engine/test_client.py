"""The replica's end of the wire, against a scheduler double on a real socket."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from api_server.engine import client as engine_client
from api_server.engine.client import EngineClient
from api_server.engine.submission import Inbox, Submission
from interfaces.context.images import ImageMetadata
from interfaces.context.text import TextContext
from interfaces.context.vision import TextAndVisionContext
from interfaces.messages import FIRST_VERSION, REGISTRATION_SIZE, Finish, Results, SchedulingOptions, WorkerHello
from interfaces.request.sampling import SamplingParams
from interfaces.result.outputs import TextGenerationOutput
from interfaces.result.results import ErrorCode, GenerationStatus, RequestError, SchedulerResult, SchedulerStatus
from interfaces.wire import shared_memory
from interfaces.wire.codec import encode
from interfaces.wire.shared_memory import DIRECTORY, PREFIX, SharedMemoryArray
from shared.endpoints import RunDirectory
from tests.api_server.scheduler_double import SchedulerDouble

PROMPT = np.arange(5, dtype=np.int32)


@pytest.fixture
async def engine(double: SchedulerDouble, run_directory: RunDirectory) -> AsyncIterator[EngineClient]:
    double.answer = lambda _: [7, 8, 9, 10, 11, 12]
    client = EngineClient(run_directory.api_endpoint, "test")
    client.start()
    await until(lambda: client.health().ready)
    yield client
    client.close()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def sampling(tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)


def asking(request_id: str, params: SamplingParams, cache_salt: str = "") -> TextContext:
    return TextContext.from_prompt(PROMPT, params, request_id=request_id, cache_salt=cache_salt)


Update = SchedulerResult[TextGenerationOutput]


async def read_all(submission: Submission) -> list[Update]:
    results: list[Update] = []
    async with asyncio.timeout(5):
        while not (results and results[-1].is_done):
            results.append((await submission.inbox.next())[1])
    return results


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def output_of(update: Update) -> TextGenerationOutput:
    assert update.result is not None
    return update.result


def tokens_of(results: list[Update]) -> list[int]:
    return [token for update in results for token in output_of(update).tokens]


async def test_tokens_arrive_in_order_and_end(engine: EngineClient, double: SchedulerDouble) -> None:
    results = await read_all(engine.submit(asking("r", sampling())))
    assert tokens_of(results) == [7, 8, 9, 10, 11, 12]
    assert all(update.status is SchedulerStatus.ACTIVE for update in results[:-1])
    assert results[-1].status is SchedulerStatus.COMPLETE
    assert output_of(results[-1]).final_status is GenerationStatus.MAXIMUM_LENGTH
    assert output_of(results[0]).request_id == "r"
    assert double.submits[0].text.tokens.prompt.tolist() == PROMPT.tolist()
    assert engine.running == 0


async def test_news_of_a_slow_reader_coalesce(engine: EngineClient, double: SchedulerDouble) -> None:
    submission = engine.submit(asking("r", sampling(50)))
    await until(lambda: submission.context.tokens.generated_length == 50)
    assert len(await read_all(submission)) == 1


async def test_an_inbox_may_wait_for_several_tokens_but_never_with_the_first_or_the_end() -> None:
    inbox = Inbox()
    inbox.at_a_time = 4
    submission = Submission(1, asking("r", sampling(20)), inbox, SchedulingOptions())

    def read() -> list[int]:
        found = inbox.taken()
        return [] if found is None else output_of(found[1]).tokens

    told = []
    for token in range(7, 17):
        submission.add(token, None)
        told.append(read())
    assert told == [[7], [], [], [], [8, 9, 10, 11], [], [], [], [12, 13, 14, 15], []]
    submission.end(GenerationStatus.MAXIMUM_LENGTH)
    assert read() == [16]


async def test_versions_of_the_weights_that_come_again_are_the_same_ones() -> None:
    """A stream that is taken up again sends those of tokens that are here already."""
    submission = Submission(1, asking("r", sampling(20)), Inbox(), SchedulingOptions())
    for version, first in (("a", 3), ("b", 5), ("a", 3), ("b", 5), ("b", 7)):
        submission.goes_on_with(version, first)
    assert submission.versions == [(0, FIRST_VERSION), (3, "a"), (5, "b")]
    submission.goes_on_with("c", 0)
    assert submission.versions == [(0, "c")]


async def test_news_that_nobody_wants_are_left_to_who_goes_on_with_the_context() -> None:
    inbox = Inbox()
    context = asking("r", sampling(20))
    first = Submission(1, context, inbox, SchedulingOptions())
    first.add(7, None)
    inbox.discard(first)
    inbox.discard(first)
    assert inbox.taken() is None
    second = Submission(2, first.context, inbox, SchedulingOptions())
    second.add(8, None)
    found = inbox.taken()
    assert found is not None
    assert (found[0], output_of(found[1]).tokens) == (second, [7, 8])


async def test_one_inbox_serves_many_submissions(engine: EngineClient) -> None:
    inbox = Inbox()
    open_ = {engine.submit(asking(str(i), sampling(3 + i)), inbox=inbox): 3 + i for i in range(10)}
    counts = dict.fromkeys(open_, 0)
    async with asyncio.timeout(5):
        while open_:
            submission, update = await inbox.next()
            counts[submission] += len(output_of(update).tokens)
            if update.is_done:
                assert counts[submission] == open_.pop(submission)


async def test_cancel_reaches_the_scheduler_once(engine: EngineClient, double: SchedulerDouble) -> None:
    submission = engine.submit(asking("r", sampling(10**6)))
    await submission.inbox.next()
    engine.cancel([submission])
    engine.cancel([submission])
    await until(lambda: double.cancelled)
    assert double.cancelled == [submission.handle]
    assert not double.running


@pytest.mark.slow
async def test_a_restarted_scheduler_gets_open_requests_with_what_was_emitted(
    engine: EngineClient, double: SchedulerDouble
) -> None:
    double.step_seconds = 0.01
    submission = engine.submit(asking("r", sampling(60), "s"))
    first = (await submission.inbox.next())[1]
    await asyncio.to_thread(double.restart)
    rest = await read_all(submission)
    assert tokens_of([first, *rest]) == [7, 8, 9, 10, 11, 12] * 10
    before, after = double.submits
    assert 1 <= after.text.tokens.generated_length < 60
    assert after.text.tokens.prompt.tolist() == PROMPT.tolist()
    assert after.handle != before.handle
    assert before.handle in double.cancelled
    assert (after.text.request_id, after.text.cache_salt) == ("r", "s")
    assert after.text.sampling_params == before.text.sampling_params


@pytest.mark.slow
async def test_results_of_a_past_incarnation_are_ignored(engine: EngineClient, double: SchedulerDouble) -> None:
    double.hold.set()
    old = double.incarnation
    submission = engine.submit(asking("r", sampling()))
    await until(lambda: double.running)
    await asyncio.to_thread(double.restart)
    await until(lambda: len(double.submits) == 2)
    double.send_raw(encode(Results(old, int32(submission.handle), int32(3), np.ones(1, np.int8))))
    double.hold.clear()
    assert tokens_of(await read_all(submission)) == [7, 8, 9, 10, 11, 12]


def token_of(double: SchedulerDouble, submission: Submission, token: int, number: int) -> bytes:
    return encode(
        Results(double.incarnation, int32(submission.handle), int32(token), np.zeros(1, np.int8), number=number)
    )


async def test_results_that_were_lost_leave_no_gap(engine: EngineClient, double: SchedulerDouble) -> None:
    double.hold.set()
    submission = engine.submit(asking("r", sampling()))
    await until(lambda: double.running)
    double.send_raw(token_of(double, submission, 7, REGISTRATION_SIZE))
    await until(lambda: submission.context.tokens.generated_length == 1)
    double.send_raw(token_of(double, submission, 9, REGISTRATION_SIZE + 2))
    await until(lambda: len(double.submits) == 2)
    before, after = double.submits
    assert after.text.tokens.generated.tolist() == [7]
    assert after.again
    assert not before.again
    assert before.handle in double.cancelled
    double.hold.clear()
    assert tokens_of(await read_all(submission)) == [7, 8, 9, 10, 11, 12]


async def test_results_that_make_no_sense_leave_no_gap(engine: EngineClient, double: SchedulerDouble) -> None:
    double.hold.set()
    submission = engine.submit(asking("r", sampling()))
    await until(lambda: double.running)
    broken = Results(
        double.incarnation, int32(submission.handle, 1), int32(7), np.zeros(1, np.int8), number=REGISTRATION_SIZE
    )
    double.send_raw(encode(broken))
    await asyncio.sleep(0.05)
    double.send_raw(token_of(double, submission, 8, REGISTRATION_SIZE + 1))
    await until(lambda: len(double.submits) == 2)
    double.hold.clear()
    assert tokens_of(await read_all(submission)) == [7, 8, 9, 10, 11, 12]


async def test_a_request_that_no_message_can_hold_fails_alone(
    engine: EngineClient, double: SchedulerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.hold.set()
    other = engine.submit(asking("other", sampling()))
    monkeypatch.setattr(engine_client, "MAX_MESSAGE_BYTES", 5000)
    huge = TextContext.from_prompt(np.arange(5000, dtype=np.int32), sampling(), request_id="huge")
    error = (await read_all(engine.submit(huge)))[-1].error
    assert error is not None
    assert error.code == ErrorCode.INVALID
    assert "5000 are the most" in error.message
    double.hold.clear()
    assert tokens_of(await read_all(other)) == [7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("late", [True, False])
async def test_after_a_standstill_of_this_process_the_scheduler_is_not_blamed(
    engine: EngineClient, double: SchedulerDouble, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A whole machine that was suspended: nobody could speak, and nobody's requests fail for it."""
    double.hold.set()
    submission = engine.submit(asking("r", sampling()))
    await until(lambda: double.running)
    double.silent.set()
    await asyncio.sleep(0.2)
    assert engine._hello is not None
    engine._hello.cancel()
    engine._heard -= 3600
    engine._last_beat -= 3600 if late else 0
    # A request that comes before this process has noticed that it stood still.
    other = engine.submit(asking("s", sampling()))
    engine._beat()
    assert engine.running == (2 if late else 0)
    double.silent.clear()
    double.hold.clear()
    if late:
        for one in (submission, other):
            assert tokens_of(await read_all(one)) == [7, 8, 9, 10, 11, 12]
    else:
        error = (await read_all(other))[-1].error
        assert error is not None
        assert "silent for" in error.message


@pytest.mark.parametrize(
    "message",
    [
        lambda _: b"",
        lambda _: b"\xff\x00garbage",
        lambda _: b"\x93\x01\x05\xc0",
        lambda incarnation: encode(Results(incarnation, int32(1, 2), int32(1), np.zeros(1, np.int8))),
        lambda _: encode(WorkerHello("cpu", 0, 0, 1, 1, 1, 1, 1, 1, "", "", "")),
    ],
    ids=["empty", "garbage", "wrong_fields", "uneven_columns", "not_for_us"],
)
async def test_malformed_messages_are_logged_and_dropped(
    engine: EngineClient, double: SchedulerDouble, message: Callable[[int], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        double.send_raw(message(double.incarnation))
        await until(lambda: any("dropped" in record.message for record in caplog.records))
    assert tokens_of(await read_all(engine.submit(asking("r", sampling(2))))) == [7, 8]


async def test_a_refusal_comes_as_a_result(engine: EngineClient, double: SchedulerDouble) -> None:
    double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    results = await read_all(engine.submit(asking("r", sampling())))
    assert results[-1].error == double.refuse


async def test_a_failure_without_reason_still_has_an_error(engine: EngineClient, double: SchedulerDouble) -> None:
    double.hold.set()
    submission = engine.submit(asking("r", sampling()))
    await until(lambda: double.running)
    failed = np.array([Finish.FAILED], np.int8)
    failure = Results(double.incarnation, int32(submission.handle), int32(-1), failed)
    double.send_raw(encode(failure))
    error = (await read_all(submission))[-1].error
    assert error is not None
    assert error.code == ErrorCode.FAILED


@pytest.mark.slow
async def test_silence_makes_unhealthy_then_refuses_then_fails_what_is_open(
    engine: EngineClient, double: SchedulerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(engine_client, "GIVE_UP_SECONDS", 0.6)
    double.hold.set()
    waiting = engine.submit(asking("r", sampling()))
    double.silent.set()
    await until(lambda: not engine.health().alive)
    refused = (await read_all(engine.submit(asking("late", sampling()))))[-1].error
    failed = (await read_all(waiting))[-1].error
    assert refused is not None
    assert failed is not None
    assert refused.code == failed.code == ErrorCode.UNAVAILABLE
    double.silent.clear()
    await until(lambda: engine.health().alive)


async def test_a_server_that_stops_is_alive_only_if_it_ever_was_ready(
    engine: EngineClient, run_directory: RunDirectory
) -> None:
    engine.draining = True
    assert (engine.health().alive, engine.health().ready) == (True, False)
    starting = EngineClient(run_directory.api_endpoint, "starting")
    starting.draining = True
    assert (starting.health().alive, starting.health().ready) == (False, False)


# Arrays in shared memory


def seeing(request_id: str, tokens: int, *pixels: NDArray[np.float32]) -> TextAndVisionContext:
    prompt = [9 if i % 2 else 1 for i in range(2 * len(pixels) + 1)]
    images = [
        ImageMetadata(start_idx=2 * i + 1, end_idx=2 * i + 2, pixel_values=values) for i, values in enumerate(pixels)
    ]
    return TextAndVisionContext.from_prompt(
        prompt, sampling(tokens), request_id=request_id, vision_token_ids=[9], images=images
    )


def picture() -> NDArray[np.float32]:
    return np.random.default_rng().random((3, 192, 192), np.float32)


def segments() -> set[str]:
    return {path.name for path in DIRECTORY.glob(f"{PREFIX}*-{os.getpid()}-*")}


@pytest.fixture
def removals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of segments in the order of their removal."""
    names: list[str] = []

    def counting(name: str, unlink: Callable[[str], None] = shared_memory._unlink) -> None:
        names.append(name)
        unlink(name)

    monkeypatch.setattr(shared_memory, "_unlink", counting)
    return names


async def test_large_arrays_stand_in_shared_memory_until_the_request_has_ended(
    engine: EngineClient, double: SchedulerDouble, removals: list[str]
) -> None:
    before, large, small = segments(), picture(), np.ones((3, 4, 4), np.float32)
    double.hold.set()
    submission = engine.submit(seeing("r", 6, large, small))
    await until(lambda: double.submits)
    received = double.submits[0].context
    assert isinstance(received, TextAndVisionContext)
    assert isinstance(received.images[0].pixel_values, SharedMemoryArray)
    assert isinstance(received.images[1].pixel_values, np.ndarray)
    np.testing.assert_array_equal(received.images[0].pixels, large)
    np.testing.assert_array_equal(received.images[1].pixels, small)
    assert len(segments() - before) == 1
    double.hold.clear()
    assert tokens_of(await read_all(submission)) == [7, 8, 9, 10, 11, 12]
    engine.cancel([submission])
    assert segments() == before
    assert removals == [received.images[0].pixel_values.name]
    again = submission.context
    assert isinstance(again, TextAndVisionContext)
    np.testing.assert_array_equal(again.images[0].pixel_values, large)
    double.hold.set()
    resubmitted = engine.submit(again)
    await until(lambda: len(double.submits) == 2)
    np.testing.assert_array_equal(double.submits[1].context.images[0].pixels, large)  # type: ignore[union-attr]
    engine.cancel([resubmitted])
    assert segments() == before


async def test_cancelled_refused_and_unsent_requests_leave_nothing_in_shared_memory(
    engine: EngineClient, double: SchedulerDouble, removals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = segments()
    double.hold.set()
    cancelled = engine.submit(seeing("cancelled", 6, picture(), picture()))
    await until(lambda: double.running)
    assert len(segments() - before) == 2
    engine.cancel([cancelled])
    assert segments() == before
    double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    await read_all(engine.submit(seeing("refused", 6, picture())))
    assert segments() == before
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_send_bytes", lambda data: False)
        await read_all(engine.submit(seeing("unsent", 6, picture())))
    assert segments() == before
    assert len(removals) == len(set(removals)) == 4


@pytest.mark.slow
async def test_a_restarted_scheduler_is_given_the_same_segments(
    engine: EngineClient, double: SchedulerDouble, removals: list[str]
) -> None:
    before, pixels = segments(), picture()
    double.step_seconds = 0.01
    submission = engine.submit(seeing("r", 60, pixels))
    await submission.inbox.next()
    await asyncio.to_thread(double.restart)
    await until(lambda: len(double.submits) == 2)
    first, second = (submit.context.images[0] for submit in double.submits)  # type: ignore[union-attr]
    assert first.pixel_values == second.pixel_values
    np.testing.assert_array_equal(second.pixels, pixels)
    await read_all(submission)
    assert segments() == before
    assert len(removals) == 1


async def test_answers_to_one_prompt_share_its_images(
    engine: EngineClient, double: SchedulerDouble, removals: list[str]
) -> None:
    before = segments()
    first, second = seeing("a", 3, picture()), seeing("b", 10**6, picture())
    second.images = first.images
    short, long = engine.submit(first), engine.submit(second)
    assert len(segments() - before) == 1
    await read_all(short)
    assert len(segments() - before) == 1
    engine.cancel([long])
    assert segments() == before
    assert len(removals) == 1


async def test_a_full_shared_memory_means_inline(
    engine: EngineClient, double: SchedulerDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "_room", lambda: 100_000.0)
    monkeypatch.setattr(shared_memory, "_last_warning", -1e9)
    before, pixels = segments(), [picture() for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        for i, values in enumerate(pixels):
            await read_all(engine.submit(seeing(str(i), 2, values)))
    for submit, values in zip(double.submits, pixels, strict=True):
        assert isinstance(submit.context, TextAndVisionContext)
        np.testing.assert_array_equal(submit.context.images[0].pixel_values, values)
    assert segments() == before
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "travels inline" in caplog.text


async def test_goodbye_at_the_end(engine: EngineClient, double: SchedulerDouble) -> None:
    engine.close()
    engine.close()
    await until(lambda: double.goodbyes == [engine.replica])


async def test_handles_stay_within_32_bits_and_skip_those_in_flight(
    engine: EngineClient, double: SchedulerDouble
) -> None:
    double.hold.set()
    engine._last_handle = 0
    first = engine.submit(asking("a", sampling()))
    engine._last_handle = 0x7FFFFFFF
    second = engine.submit(asking("b", sampling()))
    assert (first.handle, second.handle) == (1, 2)
