"""Speech over HTTP from real processes: transformers' samples, also when the worker is killed in the middle."""

from __future__ import annotations

import http.client
import io
import json
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from api_server.speech.encoding import Encoder, to_int16
from api_server.speech.sentences import sentences
from shared.speech_files import SpeechFiles
from tests.model_worker.speech.tiny_vits import Reference, tiny_vits
from tests.system.server import Server

TEXT = "the first train leaves at nine. the second one is late again. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vits(tmp_path_factory.mktemp("speech") / "tiny-speaker")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A tiny model's passes are shorter than the turns of threads that wait for each other on a busy machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        server = Server(folder, ["--devices", "cpu"], tmp_path_factory.mktemp("log") / "log")
        with server:
            yield server


def expected(folder: Path, text: str, seed: int, speed: float = 1.0) -> NDArray[np.float32]:
    """What transformers makes of each sentence."""
    files = SpeechFiles.read(folder)
    reference = Reference(folder)
    pairs = enumerate(sentences(text))
    threads = torch.get_num_threads()
    # As the worker's: with other sums the length of a sound, which is rounded up, may be another.
    torch.set_num_threads(1)
    try:
        return np.concatenate([reference.samples(files.ids_of(one), seed + i, speed) for i, one in pairs])
    finally:
        torch.set_num_threads(threads)


def open_stream(server: Server, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=90)
    connection.request("POST", "/v1/audio/speech", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def running(server: Server) -> float:
    return sum(server.metrics("tokenyard_requests_running").values())


def test_openais_client_hears_transformers_samples(server: Server, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    answer = client.audio.speech.create(
        model="tiny-speaker",
        voice="default",
        input="Hello there, my friend.",
        response_format="wav",
        speed=0.8,
        extra_body={"seed": 555},
    )
    with wave.open(io.BytesIO(answer.content)) as file:
        found = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    # Samples are rounded to 16 bits, so a last bit may differ.
    samples = to_int16(expected(folder, "Hello there, my friend.", 555, 0.8))
    np.testing.assert_allclose(found, samples, atol=1)


def test_the_sound_goes_on_when_the_worker_is_killed(server: Server, folder: Path) -> None:
    sound = expected(folder, TEXT, 7)
    assert len(sentences(TEXT)) == 40
    connection, response = open_stream(server, input=TEXT, response_format="pcm", seed=7)
    with closing(connection):
        heard = response.read(100)
        server.child("model_worker").kill()
        heard += response.read()
    found = np.frombuffer(heard, np.int16)
    undisturbed = np.frombuffer(Encoder("pcm", 8000, 24_000).whole(sound), np.int16)
    np.testing.assert_allclose(found, undisturbed, atol=1)
    server.wait_for("the worker's return", 60, server.is_ready)
    again = httpx.post(
        f"{server.url}/v1/audio/speech", json={"input": TEXT, "response_format": "pcm", "seed": 7}, timeout=90
    )
    assert again.content == heard


def test_a_client_that_leaves_frees_the_worker(server: Server) -> None:
    connection, response = open_stream(server, input=TEXT, response_format="pcm")
    response.read(100)
    connection.close()
    response.close()
    server.wait_for("the end of the request", 30, lambda: running(server) == 0)


def test_why_shows_what_was_decided(server: Server) -> None:
    body = {"input": "hello there", "response_format": "wav"}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=90)
    command = [sys.executable, "-m", "deploy.cli", "why", answer.headers["x-request-id"]]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "queued with 1 texts of 23 tokens to speak" in shown.stdout, shown
    assert "finished: 1 texts" in shown.stdout
