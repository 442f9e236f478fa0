"""A real Whisper beside transformers' pipeline, if one is here: segments, captions, and the words with their times.

TOKENYARD_TEST_WHISPER is the folder of its checkpoint, and TOKENYARD_TEST_SPEECH a sound file of English speech, of
16,000 samples a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from numpy.typing import NDArray

from tests.api_server.media.test_sound import by_sndfile
from tests.system.server import Server

FOLDER = os.environ.get("TOKENYARD_TEST_WHISPER", "")
SOUND = os.environ.get("TOKENYARD_TEST_SPEECH", "")
RATE = 16_000
# A text, and its times in seconds.
Piece = tuple[str, float, float]

pytestmark = pytest.mark.skipif(
    not (FOLDER and SOUND), reason="TOKENYARD_TEST_WHISPER and TOKENYARD_TEST_SPEECH name no model and no speech"
)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """transformers' own, whose files must name alignment_heads and no_timestamps_token_id."""
    made: Any = transformers.pipeline
    return made("automatic-speech-recognition", model=FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = ["--devices", "cpu", "--dtype", "float32", "--kv-memory", "1GB"]
    with Server(Path(FOLDER), flags, tmp_path_factory.mktemp("log") / "log") as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300)


def clip(seconds: float) -> NDArray[np.float32]:
    """The speech, cut or repeated."""
    samples, rate = soundfile.read(SOUND, dtype="float32", always_2d=True)
    assert rate == RATE
    return np.resize(samples[:, 0], int(seconds * RATE))


def chunks(pipeline: Any, sound: NDArray[np.float32], times: bool | str) -> list[Piece]:
    """The pipeline's segments, or its words, of greedy decoding. What it leaves open ends with the sound."""
    given = {"raw": sound.copy(), "sampling_rate": RATE}
    found = pipeline(given, return_timestamps=times, generate_kwargs={"num_beams": 1})["chunks"]
    last = len(sound) / RATE
    pieces = [(one["text"].strip(), one["timestamp"][0], one["timestamp"][1]) for one in found]
    return [(text, start, min(last, last if end is None else end)) for text, start, end in pieces if text]


def captions(text: str) -> list[Piece]:
    """The captions of an srt or vtt file."""
    stamp = r"(\d\d):(\d\d):(\d\d)[,.](\d\d\d)"
    found = re.findall(rf"{stamp} --> {stamp}\n(.*)\n", text)
    seconds = [[int(part) for part in each[:8]] for each in found]
    times = [[h * 3600 + m * 60 + s + ms / 1000 for h, m, s, ms in (one[:4], one[4:])] for one in seconds]
    return [(each[8], start, end) for each, (start, end) in zip(found, times, strict=True)]


@pytest.mark.parametrize("seconds", [60, 150])
def test_times_and_captions_are_those_of_the_pipeline(client: openai.OpenAI, pipeline: Any, seconds: int) -> None:
    sound = clip(seconds)
    asked: dict[str, Any] = {"model": "", "file": ("a.wav", by_sndfile(sound, RATE, "WAV", "FLOAT"))}
    made = client.audio.transcriptions.create(
        **asked, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    segments = [(one.text.strip(), one.start, one.end) for one in made.segments or ()]
    segments = [one for one in segments if one[0]]
    check(segments, chunks(pipeline, sound, True), 0.021)
    words = [(one.word, one.start, one.end) for one in made.words or ()]
    check(words, chunks(pipeline, sound, "word"), 0.021)
    for form in ("srt", "vtt"):
        text = client.audio.transcriptions.create(**asked, response_format=form)
        check(captions(str(text)), segments, 0.0051)


def check(found: list[Piece], want: list[Piece], most: float) -> None:
    assert [text for text, *_ in found] == [text for text, *_ in want]
    times = np.array([[start, end] for _, start, end in found])
    np.testing.assert_allclose(times, [[start, end] for _, start, end in want], atol=most)
