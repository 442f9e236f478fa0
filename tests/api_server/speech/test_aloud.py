"""Answers that are read aloud: sentences wait for their turn, however full the queue is, and clips may be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api_server.engine import scheduling
from api_server.engine.client import EngineClient
from api_server.errors import ErrorKind, RequestFailed
from api_server.speech.aloud import Aloud
from api_server.speech.speaking import speak
from api_server.speech.wish import Wish
from api_server.state import ServerState
from api_server.text.pooled_model import PooledModel
from api_server.text.speaking_model import SpeakingModel
from api_server.text.tokenizer import Tokenizer
from api_server.web.endpoint import Call
from interfaces import PooledValues, SchedulingOptions
from shared.access_keys import Caller
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.engine.test_client import until
from tests.api_server.scheduler_double import SchedulerDouble
from tests.api_server.speech.conftest import SpeechDouble, sound_of
from tests.model_worker.speech.tiny_speaker import tiny_speaker
from tests.one_shot.test_speech_tokens import clip_of


async def test_sentences_of_an_answer_that_has_begun_wait_in_a_full_queue(
    run_directory: RunDirectory, speaker: Path
) -> None:
    tokenizer = Tokenizer.load(str(speaker))
    settings = Settings(model=str(speaker))
    double = SpeechDouble(run_directory.api_endpoint, lambda _: [], max_model_len=1024, vocab_size=tokenizer.vocab_size)
    double.full_from = 0
    engine = EngineClient(run_directory.api_endpoint, "test")
    engine.start()
    try:
        await until(lambda: engine.health().ready)
        server = ServerState(settings, tokenizer, engine, PooledModel.of(settings))
        call = Call(server, {"path": "/v1/chat/completions", "state": {"caller": Caller()}}, b"", "a-request")
        with pytest.raises(RequestFailed) as refused:
            await anext((await speak(call, Wish(input="good morning"))).pieces())
        assert refused.value.kind is ErrorKind.OVERLOADED
        aloud = Aloud(call, server, None, 7)
        found = [samples for text in ("good morning", "good night") async for samples in aloud.pieces(text)]
    finally:
        engine.close()
        double.close()
    contexts = double.contexts[1:]
    assert len(found) == len(contexts) == 2
    for i, (samples, context) in enumerate(zip(found, contexts, strict=True)):
        np.testing.assert_array_equal(samples, sound_of(context.tokens, 7 + i, 1.0))


@pytest.mark.parametrize(
    ("allowed", "text", "field", "message"),
    [
        (False, "it is dark", "ref_audio", "voices by clip are off on this server"),
        (True, "", "ref_text", "must be the words that are spoken in ref_audio"),
        (True, "it is dark", None, ""),
    ],
)
def test_a_clip_of_a_voice_needs_its_words_and_the_operators_leave(
    allowed: bool, text: str, field: str | None, message: str, tmp_path: Path
) -> None:
    folder = tiny_speaker(tmp_path / "tiny-speaker")
    tokenizer = Tokenizer.load(str(folder))
    no_engine: Any = None
    speaking = SpeakingModel.of(str(folder), tokenizer)
    server = ServerState(Settings(model=str(folder), voice_clips=allowed), tokenizer, no_engine, speaking=speaking)
    call = Call(server, {"path": "/v1/chat/completions", "state": {"caller": Caller()}}, b"", "a-request")
    try:
        if field is None:
            Aloud(call, server, None, 7, "UklGRg==", text)
            return
        with pytest.raises(RequestFailed, match=message) as refused:
            Aloud(call, server, None, 7, "UklGRg==", text)
        assert refused.value.field == field
    finally:
        server.accounts.close()


async def test_a_clip_takes_of_the_requests_time_and_leaves_room_for_a_sentence(
    run_directory: RunDirectory, tmp_path: Path
) -> None:
    folder = tiny_speaker(tmp_path / "tiny-speaker")
    tokenizer = Tokenizer.load(str(folder))
    codes = PooledValues(np.zeros((150, 1), np.float32), np.array([150], np.int32))
    double = SchedulerDouble(run_directory.api_endpoint, lambda _: [], tasks=["encode_speech"], pooled=lambda _: codes)
    engine = EngineClient(run_directory.api_endpoint, "test")
    engine.start()
    speaking = SpeakingModel.of(str(folder), tokenizer)
    server = ServerState(Settings(model=str(folder), voice_clips=True), tokenizer, engine, speaking=speaking)
    call = Call(server, {"path": "/v1/chat/completions", "state": {"caller": Caller()}}, b"", "a-request")
    uri, _ = clip_of(0.05)
    try:
        await until(lambda: engine.health().ready)
        scheduling.current.set(SchedulingOptions(total_seconds=300.0))
        await Aloud(call, server, None, 7, uri, "it is dark").begin()
        told = double.submits[-1].scheduling.total_seconds
        left = scheduling.current.get().total_seconds
        assert told is not None
        assert left is not None
        assert left < told < 300
        with pytest.raises(RequestFailed, match=r"ref_text and the clip take .* 256 are possible") as refused:
            await Aloud(call, server, None, 7, uri, "dark " * 200).begin()
        assert (refused.value.kind, refused.value.field) == (ErrorKind.TOO_LONG, "ref_text")
    finally:
        await server.media.close()
        engine.close()
        double.close()
        server.accounts.close()
