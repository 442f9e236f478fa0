"""The benchmark of speech: figures of a server are those of its answers, and other works and peers are refused."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks import speech
from benchmarks.peers.speech import peer
from benchmarks.speakers import Answer
from benchmarks.speech import RATE, chosen, clip_of, measured
from benchmarks.standard_speech import standard_speech
from tests.model_worker.hearing.tiny_whisper import tiny_whisper


async def test_figures_are_those_of_the_answers() -> None:
    class Slow:
        """Each request takes 20 ms at least."""

        at_once = 0
        most = 0

        async def speak(self, text: str) -> Answer:
            return await self._answer(2.0)

        async def transcribe(self, clip: bytes, seconds: float) -> Answer:
            return await self._answer(seconds)

        async def _answer(self, sound: float) -> Answer:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0.02)
            self.at_once -= 1
            return Answer(sound, 0.01)

    for work in chosen("A1,A2", True):
        slow = Slow()
        found = await measured(slow, work, 1, None)
        assert slow.most == min(work.streams, work.requests)
        assert found["seconds of sound"] == 2.0 * work.requests
        assert found["real-time factor"] * found["seconds of sound"] >= 0.02 * work.requests / work.streams


async def test_a_server_is_asked_by_openais_routes(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    async def spoken(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body["response_format"])
        return web.Response(body=bytes(48_000))

    async def heard(request: web.Request) -> web.Response:
        form = await request.post()
        with wave.open(io.BytesIO(form["file"].file.read())) as file:  # type: ignore[union-attr]
            language = str(form["language"])
            seen.append(f"{language} {file.getnframes() / RATE}")
        return web.json_response({"text": "a"})

    application = web.Application(client_max_size=1 << 24)
    application.add_routes(
        [web.post("/v1/audio/speech", spoken), web.post("/v1/audio/transcriptions", heard)],
    )
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        given = ["--url", url, "--work", "A1-1,A2-8", "--language", "en", "--short", "--json"]
        assert await asyncio.to_thread(speech.main, given) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["A1-1"]["seconds of sound"] == 2.0
        assert found["A2-8"]["seconds of sound"] == 4.0
        assert sorted(seen) == ["en 2.0"] * 3 + ["pcm"] * 3
        assert await asyncio.to_thread(speech.main, ["--url", f"{url}/none", "--work", "A1"]) == 1
        assert "answered 404" in capsys.readouterr().err
    finally:
        await runner.cleanup()


async def test_transformers_transcribes_the_same_clips(tmp_path: Path) -> None:
    file = tiny_whisper(tmp_path) / "tokenizer_config.json"
    # Its pipeline wants the tokenizer of published models.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "WhisperTokenizer"}))
    found = await peer("transformers", str(tmp_path), "en").transcribe(clip_of(1, 0.8, None), 0.8)
    assert found.sound == 0.8
    assert found.first > 0


@pytest.mark.parametrize("kind", ["hears", "speaks", "vits"])
async def test_transformers_runs_the_standard_models(tmp_path: Path, kind: str) -> None:
    folder = standard_speech(tmp_path, kind, "tiny")
    speaker = peer("transformers", str(folder), "en")
    if kind == "hears":
        found = await speaker.transcribe(clip_of(1, 0.8, None), 0.8)
        assert found.sound == 0.8
    else:
        assert (await speaker.speak("a boat")).sound > 0.1


def test_clips_are_equal_for_equal_seeds_only() -> None:
    assert clip_of(1, 0.1, None) == clip_of(1, 0.1, None) != clip_of(2, 0.1, None)


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert [work.name for work in chosen("a2,A1-8", False)] == ["A1-8", "A2-1", "A2-8"]
    with pytest.raises(ValueError, match="A1, A2, A1-1"):
        chosen("A9", False)
    assert speech.main(["--work", "A1"]) == 1
    assert "exactly one of --url and --peer" in capsys.readouterr().err
    assert speech.main(["--work", "A1", "--peer", "transformers"]) == 1
    assert "--model must name" in capsys.readouterr().err
