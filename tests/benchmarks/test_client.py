"""The client against a real HTTP server: what it sends, what it clocks, and how each failure is named."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.server import free_port, wait_until_ready
from deploy.bench.client import Client, Form, _data
from deploy.bench.metrics import measure
from deploy.bench.timeline import COMPLETED, CUT_OFF, Timeline
from deploy.bench.workload import PlannedRequest
from tests.attempts import ATTEMPTS
from tests.benchmarks import sse_server
from tests.benchmarks.sse_server import FIRST_S, GAP_S, Recorder, application


class RunningServer:
    def __init__(self) -> None:
        self.recorder, self.port = Recorder(), free_port()
        self._server = uvicorn.Server(
            uvicorn.Config(application(self.recorder), port=self.port, log_level="warning", timeout_graceful_shutdown=1)
        )
        self._task = asyncio.create_task(self._server.serve())

    async def started(self) -> None:
        await wait_until_ready(f"http://127.0.0.1:{self.port}", None, None, 10)

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.wait_for(self._task, 10)

    def client(self, request_timeout: float = 10.0, form: Form | None = None) -> Client:
        return Client(f"http://127.0.0.1:{self.port}/", "scripted", request_timeout, api_key="sesame", form=form)

    async def run(
        self, *scripts: int, concurrency: int = 8, time_limit: float = 20.0, request_timeout: float = 10.0
    ) -> list[Timeline]:
        planned = [PlannedRequest([script, 5, 6], 4) for script in scripts]
        client = self.client(request_timeout)
        self.finished: list[Timeline] = []
        return await client.run(planned, concurrency, time_limit, self.finished.append)


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    server = RunningServer()
    await server.started()
    yield server
    await server.stop()


async def test_a_stream_is_clocked_by_its_chunks_with_text(server: RunningServer) -> None:
    (timeline,) = await server.run(sse_server.STEADY)
    assert (timeline.outcome, timeline.prompt_tokens, timeline.output_tokens) == (COMPLETED, 3, 4)
    assert len(timeline.chunks) == 4
    # The empty chunk was sent at once; the first text only FIRST_S later.
    assert timeline.first_token is not None
    assert timeline.first_token >= FIRST_S * 0.95
    assert timeline.sent < timeline.chunks[0] < timeline.chunks[-1] <= timeline.ended
    assert server.finished == [timeline]


async def test_gaps_are_those_of_the_chunks(server: RunningServer) -> None:
    """A machine that stands still for a moment brings two chunks at once, or the first one late: not each time."""
    for _ in range(ATTEMPTS):
        (timeline,) = await server.run(sse_server.STEADY)
        if all(gap > 0 for gap in timeline.gaps) and sum(timeline.gaps) >= 3 * GAP_S * 0.9:
            return
    pytest.fail(f"the gaps are {timeline.gaps}")


async def test_the_body_makes_every_server_do_the_same_work(server: RunningServer) -> None:
    await server.run(sse_server.ONE_TOKEN)
    assert server.recorder.bodies == [
        {
            "model": "scripted",
            "prompt": [sse_server.ONE_TOKEN, 5, 6],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_answers_in_one_piece_have_tokens_and_no_chunks(server: RunningServer) -> None:
    client = server.client(form=Form(whole=True))
    [timeline] = await client.run([PlannedRequest([sse_server.STEADY, 2, 3], 7)], 1, 10.0, lambda _: None)
    assert timeline.completed
    assert (timeline.prompt_tokens, timeline.output_tokens, timeline.chunks) == (3, 7, [])
    assert server.recorder.bodies[-1]["stream"] is False
    assert "stream_options" not in server.recorder.bodies[-1]


async def test_each_failure_has_its_name_and_the_others_complete(server: RunningServer) -> None:
    scripts = [
        sse_server.STEADY,
        sse_server.BUSY,
        sse_server.ERROR_IN_STREAM,
        sse_server.CUT_OFF,
        sse_server.NO_USAGE,
        sse_server.ONE_TOKEN,
        sse_server.HANGS,
        sse_server.BUSY,
    ]
    timelines = await server.run(*scripts, request_timeout=4.0)
    assert Counter(t.outcome for t in timelines) == {
        COMPLETED: 2,
        "HTTP 429": 2,
        "error in stream": 1,
        "stream ended without [DONE]": 1,
        "no usage in stream": 1,
        "timed out": 1,
    }
    metrics = measure(timelines, len(scripts))
    assert (metrics.output_tokens, metrics.tpot.samples, metrics.ttft.samples) == (5, 1, 2)


async def test_a_closed_loop_keeps_exactly_so_many_in_flight(server: RunningServer) -> None:
    timelines = await server.run(*[sse_server.STEADY] * 9, concurrency=3)
    assert [t.outcome for t in timelines] == [COMPLETED] * 9
    assert server.recorder.most_in_flight == 3


async def test_the_time_limit_ends_a_run(server: RunningServer) -> None:
    timelines = await server.run(*[sse_server.HANGS] * 5, concurrency=2, time_limit=0.5)
    assert [t.outcome for t in timelines] == [CUT_OFF] * 2
    assert all(0.4 < t.latency < 5 for t in timelines)
    assert measure(timelines, 5).failures == {"not finished": 2, "not sent in time": 3}


async def test_arrivals_keep_to_the_clock_whoever_is_still_there(server: RunningServer) -> None:
    planned = [PlannedRequest([script], 1) for script in (sse_server.HANGS, sse_server.ONE_TOKEN, sse_server.HANGS)]
    times = [0.3, 0.6, 0.9]
    began = time.perf_counter()
    timelines = await server.client().arrivals(planned, times, time_limit=3.0)
    assert [t.outcome for t in timelines] == [CUT_OFF, COMPLETED, CUT_OFF]
    assert all(t.sent - began >= due - 0.01 for t, due in zip(timelines, times, strict=True))
    assert timelines[2].sent < min(timelines[0].ended, timelines[2].ended)


async def test_a_server_that_takes_no_ids_is_sent_as_many_letters_and_its_chunks_are_counted(
    server: RunningServer,
) -> None:
    client = server.client(form=Form(text_prompts=True, plain_body=True, close_connections=True))
    (timeline,) = await client.run([PlannedRequest([5] * 7, 3)], 1, 10.0, lambda timeline: None)
    assert (timeline.outcome, timeline.output_tokens, timeline.prompt_tokens) == (COMPLETED, 3, 7)
    (body,) = server.recorder.bodies
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "stream"}
    assert body["prompt"] == "f" * 7


async def test_a_stream_that_breaks_off_has_no_reason_to_finish(server: RunningServer) -> None:
    client = server.client(form=Form(plain_body=True))
    (timeline,) = await client.run([PlannedRequest([sse_server.CUT_OFF] * 7, 3)], 1, 10.0, lambda timeline: None)
    assert timeline.outcome == "stream ended without [DONE]"


async def test_a_server_that_is_not_there_is_a_failure_not_a_crash() -> None:
    client = Client(f"http://127.0.0.1:{free_port()}", "any", 5.0)
    timelines = await client.run([PlannedRequest([1], 1)], 1, 5.0, lambda timeline: None)
    assert [t.outcome for t in timelines] == ["ClientConnectorError"]


@given(
    texts=st.lists(st.binary(max_size=6).map(lambda text: text.replace(b"\n", b"").replace(b"\r", b"").strip())),
    cuts=st.lists(st.integers(0, 120), max_size=12),
    ends=st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n: keep-alive\n\n"]),
)
def test_an_event_comes_with_the_last_byte_of_its_line(texts: list[bytes], cuts: list[int], ends: bytes) -> None:
    """However a stream is cut into parts, its data are the same, and each arrives with the part that ends its line."""
    stream = b"".join(b"data: " + text + ends for text in texts)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    arrivals = [(float(stop), stream[start:stop]) for start, stop in itertools.pairwise(places)]
    line_ends, at = [], 0
    for text in texts:
        line_ends.append(stream.index(b"\n", at) + 1)
        at += len(b"data: " + text + ends)
    wanted = [
        (float(min(stop for stop in places if stop >= end)), text) for end, text in zip(line_ends, texts, strict=True)
    ]
    assert list(_data(arrivals)) == wanted
