"""A transcription beside a double of the engine: one request to observers and limits, however many windows it has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from api_server.access_log import Entry
from api_server.access_log import current as current_entry
from api_server.answers.choice import Choice
from api_server.dialects.openai import transcriptions
from api_server.engine import scheduling
from api_server.engine.client import EngineClient
from api_server.engine.submission import Inbox, Submission
from api_server.errors import ErrorKind, RequestFailed
from api_server.media.clips import Clip
from api_server.state import ServerState
from api_server.text.tokenizer import Tokenizer
from api_server.transcription.transcriber import Transcription, Wish
from api_server.web.form import Form
from interfaces import (
    ErrorCode,
    GenerationStatus,
    RequestError,
    RequestID,
    SchedulingOptions,
    Submit,
    TextContext,
)
from shared.access_keys import Caller
from shared.recogniser_files import RecogniserFiles
from shared.settings import Settings
from tests.model_worker.hearing.tiny_whisper import tiny_whisper

# Frames of the tiny model's window.
WINDOW = 100


@dataclass
class EngineDouble:
    """Answers a window at once with a word between two times, and a probe with a token of its own."""

    files: RecogniserFiles
    word: int
    submits: list[Submit] = field(default_factory=list)
    cancelled: list[Submission] = field(default_factory=list)
    # The place of the request that fails, and of the one that is never answered.
    fails: int = -1
    hangs: int = -1
    segments: None = None

    def submit(self, context: TextContext, inbox: Inbox, options: SchedulingOptions, again: bool = False) -> Submission:
        submission = Submission(len(self.submits), context, inbox, options)
        submission.again = again
        place = len(self.submits)
        self.submits.append(submission.message)
        if place == self.fails:
            submission.fail(RequestError(ErrorCode.UNAVAILABLE, "the worker is gone"))
        elif place != self.hangs:
            for token in self._answer(context.sampling_params.max_new_tokens or 0):
                submission.add(token, -0.5)
            submission.end(GenerationStatus.END_OF_SEQUENCE)
        return submission

    def _answer(self, most: int) -> list[int]:
        first = self.files.first_timestamp
        return [first, self.word, first + 50, self.files.end] if most > 1 else [self.word]

    def cancel(self, submissions: Sequence[Submission]) -> None:
        self.cancelled += submissions


class Watcher:
    """An observer that writes down what it sees of answers."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.choices: list[Choice] = []

    def started(self, choice: Choice) -> None:
        self.events.append("started")
        self.choices.append(choice)

    def tokens(self, choice: Choice, count: int, since: float) -> None:
        assert choice is self.choices[0]

    def finished(self, choice: Choice) -> None:
        self.events.append("finished")

    def abandoned(self, choice: Choice) -> None:
        self.events.append("abandoned")

    def choice_failed(self, choice: Choice, error: RequestFailed) -> None:
        self.events.append("failed")


@dataclass
class Place:
    """A server of the tiny model without processes."""

    state: ServerState
    engine: EngineDouble
    watcher: Watcher

    def transcription(self, windows: int = 3, **wish: Any) -> Transcription:
        features = np.random.default_rng(1).standard_normal((8, WINDOW * windows)).astype(np.float32)
        asked = Wish(RequestID("r"), "/v1/audio/transcriptions", "tiny", **wish)
        return Transcription(self.state, Clip(features, float(windows), b"digest"), asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def place(folder: Path) -> Iterator[Place]:
    tokenizer = Tokenizer.load(str(folder))
    files = RecogniserFiles.read(str(folder), tokenizer.token_of)
    assert files is not None
    engine = EngineDouble(files, tokenizer.exact("a")[0])
    watcher = Watcher()
    settings = Settings(model=str(folder))
    made: Any = watcher
    state = ServerState(settings, tokenizer, cast(EngineClient, engine), recogniser=files, observers=[made])
    yield Place(state, engine, watcher)
    state.accounts.close()


async def test_windows_and_probes_are_one_answer(place: Place) -> None:
    entry = Entry()
    current_entry.set(entry)
    transcription = place.transcription(timestamps=True)
    await transcription.collect()
    assert transcription.text == "aaa"
    # The language, and a probe for silence before each of three windows.
    assert len(place.engine.submits) == 7
    assert place.watcher.events == ["started", "finished"]
    [choice] = place.watcher.choices
    assert choice.completion_tokens == 3 * 4
    # The start, the task: no token of these stands for sound.
    assert choice.prompt_tokens == 2
    assert [*entry.choices] == [[choice]]


async def test_segments_end_with_the_sound(place: Place) -> None:
    features = np.zeros((8, WINDOW), np.float32)
    asked = Wish(RequestID("r"), "/v1/audio/transcriptions", "tiny", language="en", timestamps=True)
    transcription = Transcription(place.state, Clip(features, 0.25, b"digest"), asked)
    await transcription.collect()
    assert [(segment.start, segment.end) for segment in transcription.segments] == [(0.0, 0.25)]


async def test_what_was_admitted_is_not_refused_in_its_middle(place: Place) -> None:
    scheduling.current.set(SchedulingOptions(queue_seconds=2.0, total_seconds=600.0))
    await place.transcription(timestamps=True).collect()
    first, *others = place.engine.submits
    assert not first.again
    assert first.scheduling.queue_seconds == pytest.approx(2.0, abs=1.0)
    assert all(submit.again for submit in others)
    assert [submit.scheduling.queue_seconds for submit in others] == [None] * 6
    assert all(0 < (submit.scheduling.total_seconds or 0) <= 600 for submit in others)


async def test_a_transcription_that_fails_is_left_to_the_answer_with_its_error(place: Place) -> None:
    place.engine.fails = 2
    with pytest.raises(RequestFailed, match="the worker is gone") as caught:
        await place.transcription(language="en").collect()
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert place.watcher.events == ["started", "failed"]


async def test_a_transcription_whose_client_leaves_is_abandoned_once(place: Place) -> None:
    place.engine.hangs = 1
    transcription = place.transcription(language="en")
    running = asyncio.create_task(transcription.collect())
    async with asyncio.timeout(60):
        while len(place.engine.submits) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    transcription.close()
    assert place.watcher.events == ["started", "abandoned"]
    assert place.engine.cancelled[-1].handle == 1


@pytest.mark.parametrize("name", ["langauge", "seed"])
def test_unknown_fields_of_a_form_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestFailed, match=f"{name} is no field of this form: leave it out") as caught:
        transcriptions.check_names(Form({"model": ["m"], name: ["1"]}), transcriptions.TranscriptionForm)
    assert caught.value.field == name
    known = Form({"language": ["en"], "chunking_strategy": ["auto"]}, {"file": b"1"})
    transcriptions.check_names(known, transcriptions.TranscriptionForm)
    with pytest.raises(RequestFailed, match="stream is no field of this form"):
        transcriptions.check_names(Form({"stream": ["true"]}), transcriptions.TranslationForm)


class Sounds:
    """Clips that are at hand, or never come."""

    def __init__(self, clip: Clip | None) -> None:
        self._clip = clip

    async def read(self, data: bytes, name: str) -> Clip:
        if self._clip is None:
            await asyncio.Event().wait()
        assert self._clip is not None
        return self._clip

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        yield


async def ask(place: Place, route: str, body: bytes, clip: Clip | None = None) -> tuple[int, Any]:
    """Status and answer of a request with this body."""
    vars(place.state.media)["clips"] = Sounds(clip)
    [found] = [each for each in transcriptions.routes() if each.path == route]
    caller = Caller("key")
    scope = {
        "type": "http",
        "method": "POST",
        "path": route,
        "route": found,
        "headers": [(b"content-type", b"multipart/form-data; boundary=XX")],
        "state": {"server": place.state, "request_id": "r", "caller": caller},
    }
    sent: list[Any] = []
    bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        message = next(bodies, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        sent.append(message)

    endpoint: Any = found.endpoint
    await endpoint(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def form(**fields: str) -> bytes:
    parts = [f'--XX\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields.items()]
    file = '--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n1\r\n--XX--\r\n'
    return ("".join(parts) + file).encode()


@pytest.fixture
def watched(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """With what a route reports beside answers."""
    for name in ("received", "failed", "left"):
        monkeypatch.setattr(Watcher, name, lambda self, *_, name=name: self.events.append(name), raising=False)
    return place


SECOND = Clip(np.zeros((8, WINDOW), np.float32), 1.0, b"digest")


async def test_a_key_over_its_limit_is_refused_before_the_form_is_read(
    watched: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = RequestFailed(ErrorKind.RATE_LIMITED, "the key has used its requests")
    with monkeypatch.context() as patch:
        patch.setattr(watched.state.accounts, "admit", lambda *_: ({}, refusal))
        assert (await ask(watched, "/v1/audio/transcriptions", b"no form"))[0] == 429
    monkeypatch.setattr(watched.state, "recogniser", None)
    status, answer = await ask(watched, "/v1/audio/transcriptions", b"no form")
    assert status == 400
    assert "needs a model that transcribes" in answer["error"]["message"]


async def test_scheduling_options_are_fields_of_the_form(watched: Place) -> None:
    body = form(language="en", timeout="500", queue_timeout="300", priority="-3")
    status, answer = await ask(watched, "/v1/audio/transcriptions", body, SECOND)
    assert (status, answer["text"]) == (200, "a")
    [submit] = watched.engine.submits
    assert 0 < (submit.scheduling.total_seconds or 0) < 500
    assert 0 < (submit.scheduling.queue_seconds or 0) <= 300
    assert submit.scheduling.priority == -3
    status, answer = await ask(watched, "/v1/audio/transcriptions", form(langauge="en"), SECOND)
    assert (status, answer["error"]["param"]) == (400, "langauge")


async def test_the_time_limit_counts_the_reading_of_the_file(watched: Place) -> None:
    status, answer = await ask(watched, "/v1/audio/transcriptions", form(timeout="0.02"))
    assert status == 504
    assert "time limit of 0.02 s: reading its file took that long" in answer["error"]["message"]
    assert not watched.engine.submits


async def test_a_translation_is_english(watched: Place) -> None:
    body = form(response_format="verbose_json")
    status, answer = await ask(watched, "/v1/audio/translations", body, SECOND)
    assert (status, answer["language"], answer["task"]) == (200, "english", "translate")


async def test_a_client_that_leaves_while_its_file_is_read_is_counted_once(watched: Place) -> None:
    asking = asyncio.create_task(ask(watched, "/v1/audio/transcriptions", form()))
    async with asyncio.timeout(60):
        while not watched.watcher.events:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert watched.watcher.events == ["received", "left"]


async def test_only_times_of_words_take_memory_for_attention(place: Place) -> None:
    # Two heads, 50 positions and 24 tokens of a window, in float32.
    assert place.transcription(timestamps=True, words=True).attention_bytes == 4 * 2 * 50 * 24
    assert place.transcription(timestamps=True).attention_bytes == 0
