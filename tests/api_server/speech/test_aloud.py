"""Sentences of an answer that has begun wait for their turn, however full the queue is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from api_server.engine.client import EngineClient
from api_server.errors import ErrorKind, RequestFailed
from api_server.speech.aloud import Aloud
from api_server.speech.speaking import speak
from api_server.speech.wish import Wish
from api_server.state import ServerState
from api_server.text.pooled_model import PooledModel
from api_server.text.tokenizer import Tokenizer
from api_server.web.endpoint import Call
from shared.access_keys import Caller
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.engine.test_client import until
from tests.api_server.speech.conftest import SpeechDouble, sound_of


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
