"""Sounds in conversations through a whole server: the answers are those of transformers' `generate`."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Event
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.api_server.media.test_sound import by_sndfile
from tests.model_worker.hearing.tiny_listeners import FAMILIES, LONGEST, RATE, TOKENS, Listening, Sound, made
from tests.model_worker.hearing.tiny_whisper import speech
from tests.system.server import Server

FLAGS = ["--dtype", "float32", "--max-batch-tokens", "64", "--max-running", "8", "--kv-memory", "8MB"]
FLAGS += ["--max-audio-seconds", "10"]
QUESTION = "the quick fox"
BEFORE = "<|im_start|>user\n"
BEHIND = f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
# The model that is served first.
FIRST = "qwen2_audio"


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Listening]:
    folder = tmp_path_factory.mktemp("listening")
    return {name: made(name, folder / name) for name in FAMILIES}


@pytest.fixture(scope="module")
def server(listening: dict[str, Listening], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    also = [flag for name, tiny in listening.items() if name != FIRST for flag in ("--also", f"{name}={tiny.path}")]
    flags = [*FLAGS, "--served-model-name", FIRST, *also]
    with Server(listening[FIRST].path, flags, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@cache
def _wav(samples: bytes) -> bytes:
    """A file has the time at which it was made, so that one sound is one file only if it is made once."""
    return by_sndfile(np.frombuffer(samples, np.float32), RATE, "WAV", "FLOAT")


def wav(sound: Sound) -> bytes:
    return _wav(sound.tobytes())


def part(sound: Sound) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(sound)).decode(), "format": "wav"}}


def uri(sound: Sound) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(wav(sound)).decode()}"


def expected(tiny: Listening, sounds: list[Sound]) -> str:
    between = [""] * (len(sounds) - 1)
    return tiny.text(tiny.answer([BEFORE, *between, BEHIND], sounds))


def ask(client: openai.OpenAI, model: str, parts: list[Any]) -> str:
    content: Any = [*parts, {"type": "text", "text": QUESTION}]
    found = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=TOKENS, temperature=0
    )
    return found.choices[0].message.content or ""


def generate(server: Server, prompt: Any, sounds: list[Sound], tokens: int = TOKENS) -> Any:
    """SGLang's answer of the first model, which has the token ids."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    key = "text" if isinstance(prompt, str) else "input_ids"
    body = {key: prompt, "audio_data": [uri(sound) for sound in sounds], "sampling_params": sampling}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_about_sounds_are_those_of_transformers(
    name: str, client: openai.OpenAI, listening: dict[str, Listening]
) -> None:
    tiny = listening[name]
    one, two = speech(1, 1.1), speech(2, tiny.family.seconds)
    for sounds in ([one], [two], [one, two]):
        assert ask(client, name, [part(sound) for sound in sounds]) == expected(tiny, sounds), len(sounds)


def test_each_dialect_gives_one_answer(server: Server, client: openai.OpenAI, listening: dict[str, Listening]) -> None:
    tiny = listening[FIRST]
    sound = speech(3, 0.8)
    want = expected(tiny, [sound])
    assert ask(client, FIRST, [{"type": "audio_url", "audio_url": {"url": uri(sound)}}]) == want
    assert ask(client, FIRST, [{"audio_url": uri(sound)}]) == want
    content: Any = [part(sound), {"type": "input_text", "text": QUESTION}]
    response = client.responses.create(
        model=FIRST, input=[{"role": "user", "content": content}], max_output_tokens=TOKENS, temperature=0
    )
    _, count = tiny.heard(sound)
    assert response.usage is not None
    assert (response.output_text, response.usage.input_tokens) == (want, len(tiny.prompt([BEFORE, BEHIND], [count])))
    native = generate(server, f"{BEFORE}{tiny.family.mark}{BEHIND}", [sound])
    ids = tiny.answer([BEFORE, BEHIND], [sound])
    assert native["output_ids"] == ids
    assert generate(server, tiny.prompt([BEFORE, BEHIND], [1]), [sound])["output_ids"] == ids
    assert generate(server, tiny.prompt([BEFORE, BEHIND], [count]), [sound])["output_ids"] == ids
    assert httpx.get(f"{server.url}/model_info").json()["has_audio_understanding"] is True


def test_sounds_at_once_and_again_are_as_one_by_one(server: Server, listening: dict[str, Listening]) -> None:
    tiny = listening[FIRST]
    prompt = f"{BEFORE}{tiny.family.mark}{BEHIND}"
    sounds = [speech(10 + number, 0.5 + 0.2 * number) for number in range(6)]
    want = [tiny.answer([BEFORE, BEHIND], [sound]) for sound in sounds]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda sound: generate(server, prompt, [sound]), sounds))
    assert [found["output_ids"] for found in together] == want
    again = generate(server, prompt, [sounds[5]])
    assert again["output_ids"] == want[5]
    assert again["meta_info"]["cached_tokens"] > 0
    # Another sound of the same length shares no tokens behind its place.
    other = speech(30, 0.5 + 0.2 * 5)
    found = generate(server, prompt, [other])
    assert found["output_ids"] == tiny.answer([BEFORE, BEHIND], [other])
    assert found["meta_info"]["cached_tokens"] < again["meta_info"]["cached_tokens"]


def test_a_transcript_is_the_answer_to_the_usual_question(
    client: openai.OpenAI, listening: dict[str, Listening]
) -> None:
    sound = speech(40, 1.2)
    tiny = listening["glmasr"]
    asked: dict[str, Any] = {"model": "glmasr", "file": ("a.wav", wav(sound))}
    end = "the fox<|im_end|>\n<|im_start|>assistant\n"
    _, count = tiny.heard(sound)
    length = len(tiny.prompt([BEFORE, end], [count]))
    # This model never ends by itself: a transcript has no more tokens than its sound, and 64.
    assert count + 64 < LONGEST - length
    ids = tiny.answer([BEFORE, end], [sound], count + 64)
    want = tiny.text(ids).strip()
    made_at_once = client.audio.transcriptions.create(**asked, prompt="the fox")
    assert made_at_once.text == want
    assert made_at_once.usage is not None
    assert made_at_once.usage.type == "tokens"
    assert (made_at_once.usage.input_tokens, made_at_once.usage.input_token_details.audio_tokens) == (length, count)
    assert made_at_once.usage.output_tokens == count + 64
    events = list(client.audio.transcriptions.create(**asked, prompt="the fox", stream=True))
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == want
    last = events[-1]
    assert last.type == "transcript.text.done"
    assert (last.text, last.usage and last.usage.output_tokens) == (want, made_at_once.usage.output_tokens)
    with pytest.raises(openai.BadRequestError, match="gives no times"):
        client.audio.transcriptions.create(**asked, response_format="srt")
    with pytest.raises(openai.BadRequestError, match="finds out by itself"):
        client.audio.transcriptions.create(**asked, language="en")


def test_a_transcript_of_mistrals_form_names_the_language(
    client: openai.OpenAI, listening: dict[str, Listening]
) -> None:
    sound = speech(41, 2.6)
    tiny = listening["voxtral"]
    _, count = tiny.heard(sound)
    texts = ["[INST]", "[/INST]lang:en[TRANSCRIBE]"]
    most = min(count + 64, LONGEST - len(tiny.prompt(texts, [count])))
    want = tiny.text(tiny.answer(texts, [sound], most)).strip()
    found = client.audio.transcriptions.create(model="voxtral", file=("a.wav", wav(sound)), language="english")
    assert found.text == want


def test_what_is_no_sound_is_refused_and_names_its_part(server: Server) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    cases: list[tuple[Any, str]] = [
        ({"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}, "is no sound file"),
        ({"type": "input_audio", "input_audio": {"data": "???"}}, "messages[0].content[0].input_audio.data"),
        ({"type": "input_audio", "input_audio": "x"}, "must be an object with data"),
        ({"type": "audio_url", "audio_url": "file:///etc/passwd"}, "messages[0].content[0].audio_url"),
        (part(speech(1, 2.5)), "longer than the 2 s"),
        (image, "messages[0].content[0]"),
    ]
    for content, words in cases:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": [content]}]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 400, words
        assert words in json.dumps(response.json(), ensure_ascii=False)
    body = {"text": "x<|AUDIO|><|AUDIO|>", "audio_data": [uri(speech(1, 1.0))]}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 400
    assert "2 places for sounds" in response.text


def test_lost_workers_change_no_answer(server: Server, listening: dict[str, Listening]) -> None:
    """The last test of this server."""
    tiny = listening[FIRST]
    prompt = f"{BEFORE}{tiny.family.mark}{BEHIND}"
    cases = {seed: speech(seed, 0.7 + 0.1 * (seed % 5)) for seed in range(50, 55)}
    want = {seed: tiny.answer([BEFORE, BEHIND], [sound]) for seed, sound in cases.items()}
    workers = [server.child("model_worker", nth).pid for nth in range(len(FAMILIES))]
    recovered = server.total("tokenyard_scheduler_recovered_total")
    began = Event()
    with ThreadPoolExecutor(5) as pool:
        running = {seed: pool.submit(streamed, server, prompt, sound, began) for seed, sound in cases.items()}
        assert began.wait(120)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for seed, answer in running.items():
            assert answer.result()[:TOKENS] == want[seed]
    server.wait_for(
        "a request that was with a lost worker",
        30,
        lambda: server.total("tokenyard_scheduler_recovered_total") > recovered,
    )


def streamed(server: Server, prompt: str, sound: Sound, began: Event) -> list[int]:
    """The tokens of an answer of the first model. `began` is set when there is a token and more are to come."""
    sampling = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    body = {"text": prompt, "audio_data": [uri(sound)], "sampling_params": sampling, "stream": True}
    found: list[int] = []
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                found = event["output_ids"]
                began.set()
    assert len(found) == 150
    return found
