"""POST /v1/audio/speech on a scheduler double, with OpenAI's own client; the samples themselves are in tests/system."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import httpx
import openai
import pytest

from api_server.speech.encoding import Encoder, to_int16
from interfaces import ErrorCode, RequestError
from tests.api_server.conftest import LiveServer, leave_when
from tests.api_server.speech.conftest import SAMPLE_RATE, SpeechServer

SENTENCES = ["the first train leaves at nine.", "the second one is late again.", "the third one never came at all."]
TEXT = " ".join(SENTENCES)


def client_of(server: SpeechServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def post(server: SpeechServer, **body: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/audio/speech", json={"input": "good morning"} | body, timeout=90)


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def test_openais_client_gets_a_file(speaking: SpeechServer) -> None:
    answer = client_of(speaking).audio.speech.create(
        model="tiny-speaker", input="good morning", voice="2", response_format="wav", speed=1.25
    )
    (context,) = speaking.double.contexts
    assert (context.voice, context.speed) == (2, 1.25)
    assert context.tokens.tolist() == speaking.files.ids_of("good morning")
    with wave.open(io.BytesIO(answer.content)) as file:
        assert file.getframerate() == SAMPLE_RATE
        frames = file.readframes(file.getnframes())
    assert frames == to_int16(speaking.sound(context)).tobytes()
    assert answer.response.headers["content-type"] == "audio/wav"
    assert answer.response.headers["x-sample-rate"] == str(SAMPLE_RATE)
    assert int(answer.response.headers["x-seed"]) == context.seeds[0]


@pytest.mark.parametrize(
    ("kind", "media_type", "begin"),
    [
        ("mp3", "audio/mpeg", b"\xff"),
        ("opus", "audio/ogg", b"OggS"),
        ("aac", "audio/aac", b"\xff"),
        ("flac", "audio/flac", b"fLaC"),
        ("wav", "audio/wav", b"RIFF"),
        ("pcm", "audio/pcm", b""),
    ],
)
def test_every_format(speaking: SpeechServer, kind: str, media_type: str, begin: bytes) -> None:
    answer = post(speaking, response_format=kind)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == media_type
    assert answer.content.startswith(begin)
    assert len(answer.content) > 500


def test_the_first_sentence_is_heard_before_the_last_is_spoken(speaking: SpeechServer) -> None:
    speaking.double.most = 1
    body = {"model": "tiny-speaker", "input": TEXT, "voice": "0", "response_format": "pcm"}
    with client_of(speaking).audio.speech.with_streaming_response.create(**body) as answer:  # type: ignore[arg-type]
        parts = answer.iter_bytes(1)
        heard = next(parts)
        speaking.double.most = 1000
        heard += b"".join(parts)
    (context,) = speaking.double.contexts
    assert [text.tolist() for text in context.texts()] == [speaking.files.ids_of(text) for text in SENTENCES]
    assert heard == Encoder("pcm", SAMPLE_RATE, 24_000).whole(speaking.sound(context))


def test_events_add_up_to_the_file_and_end_with_usage(speaking: SpeechServer) -> None:
    answer = post(speaking, input=TEXT, response_format="pcm", sample_rate=8000, stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * 3 + ["speech.audio.done"]
    (context,) = speaking.double.contexts
    sound = speaking.sound(context)
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == to_int16(sound).tobytes()
    tokens = len(context.tokens)
    usage = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens, "seconds": len(sound) / SAMPLE_RATE}
    assert events[-1]["usage"] == pytest.approx(usage, abs=1e-3)


def test_a_seed_gives_the_same_sound_and_each_sentence_its_own_noise(speaking: SpeechServer) -> None:
    first, second = (post(speaking, input=TEXT, seed=2**63 - 2, response_format="wav").content for _ in range(2))
    assert first == second
    assert speaking.double.contexts[0].seeds.tolist() == [2**63 - 2, 2**63 - 1, 0]
    post(speaking)
    post(speaking)
    assert speaking.double.contexts[-1].seeds != speaking.double.contexts[-2].seeds


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ""}, "input: String should have at least 1 character"),
        ({"input": "x" * 4097}, "input: String should have at most 4096 characters"),
        ({"input": "1234"}, "has nothing that this model can speak: it reads"),
        ({"voice": "alloy"}, "voice 'alloy' is unknown: this model has 0, 1, 2"),
        ({"voice": {"id": "3"}}, "voice '3' is unknown"),
        ({"instructions": "whisper"}, "instructions: this model takes none, so leave the field out"),
        ({"response_format": "ogg"}, "response_format: Input should be 'mp3', 'opus'"),
        ({"response_format": "opus", "sample_rate": 44100}, "sample_rate must be one of 8000"),
        ({"sample_rate": 44000}, "sample_rate: Input should be 8000"),
        ({"speed": 5}, "speed: Input should be less than or equal to 4"),
        ({"speed": 0.1}, "speed: Input should be greater than or equal to 0.25"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"stream_format": "x"}, "stream_format: Input should be 'audio' or 'sse'"),
        ({"ref_audio": "x"}, "ref_audio: this model has voices of its own only"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(speaking: SpeechServer, body: dict[str, Any], words: str) -> None:
    assert words in error_of(post(speaking, **body))
    assert not speaking.double.submits


def test_other_models_and_tasks_are_named(speaking: SpeechServer) -> None:
    assert "'nope' does not exist" in error_of(post(speaking, model="nope"), 404)
    chat = {"messages": [{"role": "user", "content": "Hello!"}]}
    refused = httpx.post(f"{speaking.url}/v1/chat/completions", json=chat, timeout=90)
    assert "speaks texts (task speak)" in error_of(refused)
    assert "/v1/audio/speech" in error_of(refused)
    refused = httpx.post(f"{speaking.url}/v1/embeddings", json={"input": "Hello!"}, timeout=90)
    assert "needs a model that makes vectors of texts" in error_of(refused)


def test_a_model_that_generates_text_does_not_speak(live: LiveServer) -> None:
    refused = httpx.post(f"{live.url}/v1/audio/speech", json={"input": "hello"}, timeout=90)
    assert "this route needs a model that speaks texts" in error_of(refused)


def test_the_models_voices_are_listed(speaking: SpeechServer) -> None:
    (model,) = httpx.get(f"{speaking.url}/v1/models", timeout=90).json()["data"]
    assert (model["task"], model["voices"], model["sample_rate"]) == ("speak", ["0", "1", "2"], SAMPLE_RATE)


def test_an_error_before_the_first_sound_has_its_status(speaking: SpeechServer) -> None:
    speaking.double.refuse = RequestError(ErrorCode.OVERLOADED, "too much waits")
    assert error_of(post(speaking), 429) == "too much waits"


def test_an_error_in_the_middle_leaves_the_answer_incomplete(speaking: SpeechServer) -> None:
    speaking.double.most = 1
    speaking.double.failure = RequestError(ErrorCode.TIMEOUT, "the time limit has passed")
    with pytest.raises(httpx.RemoteProtocolError):
        post(speaking, input=TEXT, response_format="pcm")
    answer = post(speaking, input=TEXT, response_format="pcm", stream_format="sse")
    *_, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert last["error"]["message"] == "the time limit has passed"


@pytest.mark.parametrize("most", [0, 1])
def test_a_client_that_leaves_ends_the_work(speaking: SpeechServer, most: int) -> None:
    speaking.double.most = most
    leave_when(lambda: speaking.double.contexts, speaking.live, "/v1/audio/speech", {"input": TEXT})
    speaking.double.wait(lambda: speaking.double.cancelled == [speaking.double.submits[0].handle])
    assert speaking.live.state.engine.running == 0


def test_metrics_count_sound(speaking: SpeechServer) -> None:
    answer = post(speaking, response_format="pcm", sample_rate=8000)
    seconds = len(answer.content) / 2 / SAMPLE_RATE
    text = httpx.get(f"{speaking.url}/metrics", timeout=90).text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found["tokenyard_speech_audio_seconds_sum"]) == pytest.approx(seconds)
    for name in ("speech_audio_seconds", "time_to_first_audio_seconds", "speech_real_time_factor"):
        assert float(found[f"tokenyard_{name}_count"]) == 1
    assert float(found['tokenyard_requests_total{outcome="ok",route="/v1/audio/speech"}']) == 1


def test_a_long_text_is_cut_to_what_the_worker_takes(speaking: SpeechServer) -> None:
    speaking.double.max_model_len = 41
    speaking.double.wait(lambda: speaking.live.state.max_model_len == 41)
    post(speaking, input="word " * 100, response_format="wav")
    assert speaking.double.contexts[0].lengths.max() <= 41
