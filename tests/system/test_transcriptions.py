"""Speech through a whole server, by OpenAI's client: transcripts are those of transformers' `generate`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from tests.api_server.media.test_sound import by_sndfile
from tests.model_worker.hearing.tiny_whisper import RATE, features, load, speech, tiny_whisper
from tests.system.server import Server

# Samples for each frame of features.
HOP = 160
FLAGS = ["--dtype", "float32", "--max-running", "8", "--kv-memory", "16MB", "--max-audio-seconds", "10"]


class Judge:
    """transformers' own transcripts, as text."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load(folder)
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        config: Any = self._model.generation_config
        self._times: int = config.no_timestamps_token_id + 1

    def segments(self, sound: NDArray[np.float32], **options: Any) -> list[tuple[float, float, str]]:
        mel = torch.from_numpy(features(sound))[None]
        given = {"task": "transcribe", "return_timestamps": True} | options
        found = self._model.generate(mel, return_segments=True, do_sample=False, **given)
        return [
            (round(float(s["start"]), 2), round(float(s["end"]), 2), self._text(s["tokens"].tolist()))
            for s in found["segments"][0]
        ]

    def text(self, sound: NDArray[np.float32], **options: Any) -> str:
        if len(sound) > RATE:
            return "".join(text for _, _, text in self.segments(sound, **options)).strip()
        mel = torch.from_numpy(features(sound))[None]
        # One window: a random model writes timestamps although it is asked for none, and transformers then goes on.
        given = {"task": "transcribe", "force_unique_generate_call": True} | options
        tokens = self._model.generate(mel, do_sample=False, **given)[0].tolist()
        return self._text(tokens[tokens.index(self._model.config.decoder_start_token_id) :]).strip()

    def words(self, sound: NDArray[np.float32], **options: Any) -> list[tuple[str, float, float]]:
        """The words of a sound with their times."""
        mel = torch.from_numpy(features(sound))[None]
        heard = torch.zeros(1, mel.shape[-1], dtype=torch.long)
        heard[:, : -(-len(sound) // HOP)] = 1
        given = {"task": "transcribe", "return_timestamps": True, "return_token_timestamps": True} | options
        found = self._model.generate(mel, attention_mask=heard, return_segments=True, do_sample=False, **given)
        reader: Any = SimpleNamespace(
            decode=lambda tokens, decode_with_timestamps: self._tokenizer.decode(tokens),
            eos_token_id=self._model.config.eos_token_id,
            language=None,
        )
        words = []
        before = 0.0
        for segment in found["segments"][0]:
            ends = segment["token_timestamps"].tolist()
            tokens = segment["tokens"].tolist()
            kept = [
                i
                for i, token in enumerate(tokens)
                if token < self._times and token not in self._tokenizer.all_special_ids
            ]
            times = [(round([before, *ends][i], 2), round(ends[i], 2)) for i in kept]
            texts, _, places = _combine_tokens_into_words(reader, [tokens[i] for i in kept], "english")
            pairs = zip(texts, places, strict=True)
            words += [(text.strip(), times[at[0]][0], times[at[-1]][1]) for text, at in pairs if text.strip()]
            before = ends[-1]
        return words

    def prompt(self, text: str) -> torch.Tensor:
        """The tokens that transformers' processor makes of a prompt."""
        ids = self._tokenizer(f" {text}", add_special_tokens=False).input_ids
        return torch.tensor([self._model.generation_config.prev_sot_token_id, *ids])

    def _text(self, tokens: list[int]) -> str:
        words = [token for token in tokens if token < self._times]
        return str(self._tokenizer.decode(words, skip_special_tokens=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(folder, FLAGS, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def wav(sound: NDArray[np.float32]) -> tuple[str, bytes]:
    return "a.wav", by_sndfile(sound, RATE, "WAV", "FLOAT")


def test_clips_at_once_are_as_one_by_one(client: openai.OpenAI, judge: Judge) -> None:
    sounds = [speech(number, 0.4 + 0.4 * number) for number in range(6)]

    def ask(sound: NDArray[np.float32]) -> str:
        return client.audio.transcriptions.create(model="", file=wav(sound), language="de").text

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, sounds))
    assert together == [judge.text(sound, language="de") for sound in sounds]
    assert ask(sounds[3]) == together[3]
    assert len(set(together)) == len(sounds)


def test_a_language_that_is_not_named_is_found_out(client: openai.OpenAI, judge: Judge) -> None:
    for number in range(3):
        sound = speech(20 + number, 0.9)
        assert client.audio.transcriptions.create(model="", file=wav(sound)).text == judge.text(sound)


def test_a_prompt_goes_before_a_transcript(client: openai.OpenAI, judge: Judge) -> None:
    sound = speech(30, 0.9)
    found = client.audio.transcriptions.create(model="", file=wav(sound), language="en", prompt=" the fox ").text
    assert found == judge.text(sound, language="en", prompt_ids=judge.prompt("the fox"))
    assert found != judge.text(sound, language="en")


def test_words_have_times(client: openai.OpenAI, judge: Judge) -> None:
    total = 0
    for number, seconds in enumerate((0.7, 1.0, 2.6)):
        sound = speech(60 + number, seconds)
        asked: dict[str, Any] = {"model": "", "file": wav(sound), "language": "en", "response_format": "verbose_json"}
        found = client.audio.transcriptions.create(**asked, timestamp_granularities=["word"]).words or []
        want = judge.words(sound, language="en")
        assert [word.word for word in found] == [text for text, _, _ in want]
        assert all(0 <= word.start <= word.end <= seconds + 0.03 for word in found)
        # Of two paths that are about as good, other roundings may take the other one: the arithmetic is compared with
        # transformers' over one matrix, in the tests of words.
        total += len(found)
    assert total > 10


def test_a_long_sound_is_cut_into_segments(client: openai.OpenAI, judge: Judge) -> None:
    sound = speech(31, 3.4)
    want = judge.segments(sound, language="fr")
    asked: dict[str, Any] = {"model": "", "file": wav(sound), "language": "french"}
    made = client.audio.transcriptions.create(
        **asked, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert [s.text for s in made.segments or ()] == [text for *_, text in want]
    # transformers rounds the end of a window without times down, by a product of floats.
    times = [[s.start, s.end] for s in made.segments or ()]
    np.testing.assert_allclose(times, np.minimum([[start, end] for start, end, _ in want], 3.4), atol=0.0201)
    assert (made.language, made.duration) == ("french", 3.4)
    assert all(0 <= s.no_speech_prob <= 1 and s.avg_logprob < 0 for s in made.segments or ())
    whole = "".join(text for *_, text in want).strip()
    assert made.text == whole
    assert client.audio.transcriptions.create(**asked, response_format="text").strip() == whole
    srt = client.audio.transcriptions.create(**asked, response_format="srt")
    assert srt.count(" --> ") == len(want)
    assert client.audio.transcriptions.create(**asked, response_format="vtt").startswith("WEBVTT\n\n00:00:0")
    plain = client.audio.transcriptions.create(**asked)
    assert plain.text == whole
    assert plain.usage.model_dump() == {"type": "duration", "seconds": 4.0}


def test_streamed_deltas_add_up(client: openai.OpenAI, judge: Judge) -> None:
    for sound in (speech(40, 0.8), speech(41, 2.5)):
        with client.audio.transcriptions.create(model="", file=wav(sound), language="en", stream=True) as stream:
            events = list(stream)
        *deltas, done = events
        assert done.type == "transcript.text.done"
        assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == done.text
        assert done.text == judge.text(sound, language="en")
        assert len(deltas) > 1


def test_translations(client: openai.OpenAI, judge: Judge) -> None:
    sound = speech(50, 0.9)
    assert client.audio.translations.create(model="", file=wav(sound)).text == judge.text(sound, task="translate")


@pytest.mark.parametrize(
    ("fields", "sound", "field", "reason"),
    [
        ({}, b"", "file", "the sound file is empty"),
        ({}, b"#EXTM3U\nhttp://127.0.0.1/x", "file", "is no sound file that can be read here: send WAV"),
        ({}, b"fLaC" + bytes(500), "file", "is damaged or cut off"),
        ({}, by_sndfile(np.zeros(11 * RATE, np.float32), RATE, "FLAC"), "file", "longer than the 10 s"),
        ({"language": "klingon"}, None, "language", "such as de, en, fr"),
        ({"response_format": "xml"}, None, "response_format", "one of json, text, srt, verbose_json, vtt"),
        ({"temperature": "7"}, None, "temperature", "a number of 0 to 1, got '7'"),
        ({"stream": "maybe"}, None, "stream", "true or false"),
        ({"stream": "true", "response_format": "srt"}, None, "response_format", "json or text with stream"),
        ({"timestamp_granularities[]": "letter"}, None, "timestamp_granularities", "must be segment or word"),
        ({"keywords": "x"}, None, "keywords", "is not supported"),
    ],
)
def test_refusals_name_the_field(
    server: Server, fields: dict[str, str], sound: bytes | None, field: str, reason: str
) -> None:
    data = wav(speech(1, 0.5))[1] if sound is None else sound
    url = f"{server.url}/v1/audio/transcriptions"
    response = httpx.post(url, data=fields, files={"file": ("a", data)}, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert reason in error["message"]


def test_other_routes_name_the_right_one(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "ask /v1/audio/transcriptions" in response.json()["error"]["message"]
    without = httpx.post(f"{server.url}/v1/audio/transcriptions", data={"model": ""}, files={"other": b"1"})
    assert without.json()["error"]["param"] == "file"
    as_json = httpx.post(f"{server.url}/v1/audio/transcriptions", json={"model": ""})
    assert as_json.status_code == 415
    assert httpx.get(f"{server.url}/health_generate", timeout=30).status_code == 200
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert "/v1/audio/transcriptions" in paths
    assert "/v1/chat/completions" not in paths


def test_sound_is_counted(server: Server, client: openai.OpenAI) -> None:
    before = server.metrics("tokenyard_audio_seconds_total")
    client.audio.transcriptions.create(model="", file=wav(speech(60, 2.0)))
    server.wait_for(
        "metrics",
        30,
        lambda: sum(server.metrics("tokenyard_audio_seconds_total").values()) > 1.9 + sum(before.values()),
    )


def test_a_killed_worker_costs_no_transcript(server: Server, client: openai.OpenAI, judge: Judge) -> None:
    # Each has ten windows, one behind the other.
    sounds = [speech(70 + number, 10.0) for number in range(4)]
    recovered = server.total("tokenyard_scheduler_recovered_total")
    began = Event()

    def ask(sound: NDArray[np.float32]) -> str:
        text = ""
        for event in client.audio.transcriptions.create(model="", file=wav(sound), language="en", stream=True):
            if event.type == "transcript.text.delta":
                text += event.delta
                began.set()
        return text

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, sound) for sound in sounds]
        assert began.wait(60)
        os.kill(server.child("model_worker").pid, signal.SIGKILL)
        found = [answer.result(120) for answer in running]
    assert found == [judge.text(sound, language="en") for sound in sounds]
    server.wait_for(
        "a window that was with the lost worker",
        30,
        lambda: server.total("tokenyard_scheduler_recovered_total") > recovered,
    )
