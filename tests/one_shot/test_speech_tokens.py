"""Speech tokens over HTTP from real processes.

The sound is that of transformers' `generate` and its codec, also when the worker is killed in the middle of a sentence.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from api_server.speech.encoding import Encoder, to_int16
from tests.model_worker.speech.tiny_speaker import RATE, SpeakerJudge, tiny_speaker
from tests.system.server import Server

SENTENCES = ["the first train leaves at nine, they say.", "the second one is late again, as ever."]
TEXT = " ".join(SENTENCES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Long answers, so that a worker can be killed in the middle of one.
    return tiny_speaker(tmp_path_factory.mktemp("speech") / "tiny-speaker", "dac", length=320)


@pytest.fixture(scope="module")
def judge(folder: Path) -> SpeakerJudge:
    return SpeakerJudge(folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--devices", "cpu", "--dtype", "float32", "--max-running", "8", "--kv-memory", "16MB", "--voice-clips"]
    # A tiny model's passes are shorter than the turns of threads that wait for each other on a busy machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with Server(folder, flags, tmp_path_factory.mktemp("log") / "log") as running:
            yield running


def spoken(server: Server, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT} | body, timeout=90)
    assert answer.status_code == 200, answer.text
    return answer


def open_stream(server: Server, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=90)
    connection.request("POST", "/v1/audio/speech", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def check_sound(found: NDArray[np.int16], samples: NDArray[np.float32]) -> None:
    """Samples are rounded to 16 bits, so a last bit may differ."""
    assert np.abs(samples).max() > 1e-3
    np.testing.assert_allclose(found, to_int16(samples), atol=1)


def running(server: Server) -> float:
    return sum(server.metrics("tokenyard_requests_running").values())


def test_openais_client_hears_transformers_samples(server: Server, judge: SpeakerJudge) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    (model,) = client.models.list().data
    facts = model.model_dump()
    assert (facts["task"], facts["voices"], facts["sample_rate"]) == ("speak", ["Ada", "Bob"], RATE)
    answer = client.audio.speech.create(
        model="tiny-speaker", voice="Bob", input=SENTENCES[0], response_format="wav", extra_body={"seed": 5}
    )
    with wave.open(io.BytesIO(answer.content)) as file:
        assert file.getframerate() == RATE
        found = np.frombuffer(file.readframes(len(answer.content)), np.int16)
    check_sound(found, judge.sound(SENTENCES[0], voice="Bob"))


def test_parts_of_a_text_join_without_a_seam(server: Server, judge: SpeakerJudge) -> None:
    answer = spoken(server, response_format="pcm", sample_rate=RATE)
    check_sound(np.frombuffer(answer.content, np.int16), judge.sound(*SENTENCES))


def test_requests_beside_each_other_sound_as_alone(server: Server, judge: SpeakerJudge) -> None:
    wishes = [(sentence, voice) for sentence in SENTENCES for voice in ("Ada", "Bob")]
    with ThreadPoolExecutor(len(wishes)) as pool:
        answers = pool.map(
            lambda wish: spoken(server, input=wish[0], voice=wish[1], response_format="pcm", sample_rate=RATE), wishes
        )
        for (text, voice), answer in zip(wishes, answers, strict=True):
            check_sound(np.frombuffer(answer.content, np.int16), judge.sound(text, voice=voice))


def test_events_have_the_sound_and_its_usage(server: Server, judge: SpeakerJudge) -> None:
    answer = spoken(server, response_format="pcm", sample_rate=RATE, stream_format="sse")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    *deltas, done = events
    assert len(deltas) > 5
    sound = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    check_sound(np.frombuffer(sound, np.int16), judge.sound(*SENTENCES))
    # The first window has two frames, and comes before the last token.
    assert len(base64.b64decode(deltas[0]["audio"])) == 2 * 2 * 8
    tokens = sum(len(judge.prompt(sentence)) for sentence in SENTENCES)
    usage = done["usage"]
    assert usage["input_tokens"] == tokens
    assert usage["output_tokens"] >= 3 * sum(len(judge.frames(sentence)) for sentence in SENTENCES)
    assert usage["total_tokens"] == tokens + usage["output_tokens"]
    assert usage["seconds"] == pytest.approx(len(sound) / 2 / RATE, abs=1e-3)


@pytest.mark.parametrize("kind", ["mp3", "opus", "flac", "aac"])
def test_other_formats_are_files(server: Server, kind: str) -> None:
    answer = spoken(server, input=SENTENCES[0], response_format=kind)
    assert answer.headers["content-type"].startswith("audio/")
    assert len(answer.content) > 100


def test_the_sound_goes_on_when_the_worker_is_killed(server: Server, judge: SpeakerJudge) -> None:
    undisturbed = spoken(server, response_format="pcm").content
    connection, response = open_stream(server, input=TEXT, response_format="pcm")
    with closing(connection):
        heard = response.read(100)
        server.child("model_worker").kill()
        heard += response.read()
    assert heard == undisturbed
    found = np.frombuffer(heard, np.int16)
    whole = np.frombuffer(Encoder("pcm", RATE, 24_000).whole(judge.sound(*SENTENCES)), np.int16)
    np.testing.assert_allclose(found, whole, atol=1)
    server.wait_for("the worker's return", 60, server.is_ready)


def test_a_client_that_leaves_frees_the_worker(server: Server) -> None:
    connection, response = open_stream(server, input=TEXT * 40, response_format="pcm")
    response.read(100)
    # The status comes twice a second, so it may still be that of before.
    server.wait_for("the request in the status", 60, lambda: running(server) > 0)
    connection.close()
    response.close()
    server.wait_for("the end of the request", 30, lambda: running(server) == 0)


def test_a_time_limit_ends_the_sound(server: Server) -> None:
    connection, response = open_stream(server, input=TEXT * 40, response_format="pcm", timeout=1)
    with closing(connection):
        if response.status == 200:
            with pytest.raises(http.client.IncompleteRead):
                response.read()
        else:  # the limit passed before the first sound
            assert response.status == 504, response.read()
    server.wait_for("the end of the request", 30, lambda: running(server) == 0)


REF_TEXT = "it is dark"


def clip_of(seconds: float, seed: int = 4) -> tuple[str, NDArray[np.float32]]:
    """A clip as a data URI, and its samples, which are sums of tones."""
    generator = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * hertz * times) for hertz in generator.uniform(80, 3000, 5)]
    data = to_int16((0.15 * np.sum(tones, 0)).astype(np.float32))
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(data.tobytes())
    return f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}", data.astype(np.float32) / np.float32(
        32768
    )


def test_a_voice_is_imitated_from_a_clip(server: Server, judge: SpeakerJudge) -> None:
    uri, samples = clip_of(0.05)
    wish = {"input": SENTENCES[0], "ref_audio": uri, "ref_text": REF_TEXT, "response_format": "pcm"}
    wanted = judge.imitated(SENTENCES[0], samples, REF_TEXT)
    own = judge.sound(SENTENCES[0])
    assert wanted.shape != own.shape or np.abs(wanted - own).max() > 1e-3
    first = spoken(server, sample_rate=RATE, **wish)
    check_sound(np.frombuffer(first.content, np.int16), wanted)
    # The second time its codes are known, as base64 alone, too.
    batches = server.metrics("tokenyard_audio_seconds_total")[""]
    again = spoken(server, sample_rate=RATE, **(wish | {"ref_audio": uri.partition(",")[2]}))
    assert again.content == first.content
    assert server.metrics("tokenyard_audio_seconds_total")[""] > batches


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"ref_text": None}, "ref_text", "ref_text must be the words that are spoken in ref_audio"),
        ({"ref_audio": None}, "ref_text", "ref_text must go with ref_audio"),
        ({"ref_text": "one <|quiet|> two"}, "ref_text", "ref_text must be plain text, and it has the model's token"),
        ({"ref_audio": "data:audio/wav;base64,UklGRg=="}, "ref_audio", "ref_audio: the sound file is no sound file"),
        ({"ref_audio": "data:audio/wav,abc"}, "ref_audio", 'ref_audio must be a URL, or "data:TYPE;base64,"'),
        ({"ref_audio": "https://example.com/a.wav"}, "ref_audio", "ref_audio: this server fetches no URLs"),
        ({"ref_audio": clip_of(30.1)[0]}, "ref_audio", "ref_audio: the sound file is longer than the 30 s"),
        ({"ref_audio": clip_of(1)[0]}, "ref_audio", "ref_audio takes 3000 tokens, and 320 are possible"),
        ({"ref_text": "dark " * 200}, "ref_text", "ref_text and the clip take "),
    ],
)
def test_clips_that_cannot_be_used_are_refused(
    server: Server, fields: dict[str, Any], field: str, message: str
) -> None:
    wish = {"input": SENTENCES[0], "ref_audio": clip_of(0.05)[0], "ref_text": REF_TEXT}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=wish | fields, timeout=90)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["message"].startswith(message)) == (field, True), error


def test_metrics_count_the_sound(server: Server, judge: SpeakerJudge) -> None:
    before = server.metrics("tokenyard_speech_audio_seconds_sum")[""]
    tokens = sum(server.metrics("tokenyard_generation_tokens_total").values())
    answer = spoken(server, input=SENTENCES[0], response_format="pcm", sample_rate=RATE)
    after = server.metrics("tokenyard_speech_audio_seconds_sum")[""]
    generated = sum(server.metrics("tokenyard_generation_tokens_total").values()) - tokens
    assert generated >= 3 * len(judge.frames(SENTENCES[0]))
    assert after - before == pytest.approx(len(answer.content) / 2 / RATE, abs=1e-3)
    for name in ("tokenyard_time_to_first_audio_seconds", "tokenyard_speech_real_time_factor"):
        assert server.metrics(f"{name}_count")[""] >= 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"voice": "Cleo"}, "voice 'Cleo' is unknown: this model has Ada, Bob"),
        ({"speed": 2}, "speed must be 1 for a model that generates speech tokens, got 2"),
        ({"instructions": "gladly"}, "instructions: this model takes none, so leave the field out"),
        ({"input": "one <|quiet|> two"}, "input must be plain text, and it has the model's token '<|quiet|>'"),
        ({"input": "  "}, "input has nothing to speak: send a text with letters"),
    ],
)
def test_what_the_model_cannot_speak_is_refused(server: Server, body: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT} | body, timeout=90)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(message)


def test_the_document_has_the_route_beside_those_of_text(server: Server) -> None:
    paths = httpx.get(f"{server.url}/openapi.json", timeout=90).json()["paths"]
    assert {"/v1/audio/speech", "/v1/chat/completions"} <= paths.keys()
    assert "/v1/embeddings" not in paths
