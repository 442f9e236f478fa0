"""`python -m benchmarks.speech`: speech out and in, of a server with OpenAI's routes, or of a library in this process.

A1: sentences are spoken; figures are the time to the first sound and the real-time factor, by 1 and by 8 streams.
A2: clips of 60 s are transcribed; the figure is the real-time factor, by 1 and by 8 clips in flight.

The real-time factor is the time of all requests divided by the seconds of all sound: below 1 it is faster than it is
heard. With --url it asks a server, with --peer a library over the same model. Knows loads and figures. It starts no
server.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import sys
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.figures import show
from benchmarks.speakers import Answer, Server, Speaker

TIMEOUT_S = 3600.0
RATE = 16_000
_SENTENCES = (
    "The train to the north leaves at nine, and the one to the south an hour later.",
    "A small boat lay in the harbour, and its lamp was burning all night.",
    "Bread, cheese and a bottle of water were all that she had in her bag.",
    "He counted the steps to the top of the tower, and forgot the number at once.",
)


@dataclass(frozen=True)
class Work:
    """Requests by some streams at once. `clip_seconds` is the length of each clip; 0: texts are spoken."""

    name: str
    streams: int
    requests: int
    clip_seconds: float = 0.0


WORKS = {
    work.name: work
    for work in (
        Work("A1-1", 1, 4),
        Work("A1-8", 8, 16),
        Work("A2-1", 1, 2, 60.0),
        Work("A2-8", 8, 8, 60.0),
    )
}


def clip_of(seed: int, seconds: float, sound: Path | None) -> bytes:
    """A clip as a WAV file: of a sound file, from a place that depends on the seed; else tones that come and go."""
    count = int(seconds * RATE)
    if sound is not None:
        import soundfile

        samples, rate = soundfile.read(sound, dtype="float32", always_2d=True)
        if rate != RATE:
            raise ValueError(f"--sound must have {RATE} samples a second, got {rate}: resample it")
        samples = np.resize(np.roll(samples[:, 0], -seed * RATE), count)
    else:
        generator = np.random.default_rng(seed)
        times = np.arange(count) / RATE
        samples = 0.01 * generator.standard_normal(count)
        for _ in range(6):
            tone = np.sin(2 * np.pi * generator.uniform(100, 3500) * times)
            samples += 0.1 * tone * (np.sin(2 * np.pi * generator.uniform(0.5, 4) * times) > 0)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


async def measured(speaker: Speaker, work: Work, seed: int, sound: Path | None) -> dict[str, float]:
    """The figures of one piece of work."""
    clips = [clip_of(seed + i, work.clip_seconds, sound) for i in range(work.requests if work.clip_seconds else 0)]
    texts = [f"{_SENTENCES[i % len(_SENTENCES)]} Number {seed + i}." for i in range(work.requests)]
    answers: list[Answer] = []
    waiting = iter(range(work.requests))

    async def user() -> None:
        for i in waiting:
            asked = speaker.transcribe(clips[i], work.clip_seconds) if clips else speaker.speak(texts[i])
            answers.append(await asked)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(work.streams):
            group.create_task(user())
    seconds = time.perf_counter() - began
    total = sum(answer.sound for answer in answers)
    figures = {"seconds of sound": total, "real-time factor": seconds / total if total else float("nan")}
    first = statistics.median(answer.first for answer in answers)
    return figures | {"transcript p50, s" if clips else "first sound p50, s": first}


def chosen(names: str, short: bool) -> list[Work]:
    """The works of a list, of which A1 and A2 are two each. Raises ValueError."""
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()]
    works = [work for work in WORKS.values() if any(name in (work.name, work.name[:2]) for name in wanted)]
    known = {name for work in works for name in (work.name, work.name[:2])}
    if not wanted or not set(wanted) <= known:
        raise ValueError(f"--work must be a list of A1, A2, {', '.join(WORKS)}, got {names!r}")
    if not short:
        return works
    return [replace(work, requests=min(2, work.requests), clip_seconds=min(2.0, work.clip_seconds)) for work in works]


async def run(speaker: Speaker, works: Sequence[Work], seed: int, sound: Path | None) -> dict[str, dict[str, float]]:
    """The figures of each work, one after the other, after a request that warms up."""
    found = {}
    for number, work in enumerate(works):
        await measured(speaker, replace(work, streams=1, requests=1), seed + 1000 * (number + 1), sound)
        found[work.name] = await measured(speaker, work, seed + 100 * number, sound)
    return found


async def _asked(options: argparse.Namespace, works: Sequence[Work]) -> dict[str, dict[str, float]]:
    if options.peer:
        from benchmarks.peers.speech import peer

        return await run(peer(options.peer, options.model, options.language), works, options.seed, options.sound)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        server = Server(session, options.url, options.model, options.language)
        return await run(server, works, options.seed, options.sound)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speech", description=__doc__)
    add = parser.add_argument
    add("--url", default="", help="address of a server with OpenAI's routes")
    add("--peer", default="", choices=["", "transformers", "faster-whisper"], help="measure this library instead")
    add("--model", default="", help="the model's name at the server, or its folder for a library")
    add("--work", required=True, help=f"a list of A1, A2, {', '.join(WORKS)}")
    add("--language", default="", help="of the clips; without it the model finds it out")
    add("--sound", type=Path, help="a sound file of 16 kHz that clips are cut from; default: tones")
    add("--short", action="store_true", help="short clips and few requests: a test of this program")
    add("--seed", type=int, default=1, help="other seeds have other clips and texts")
    add("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    try:
        if bool(options.url) == bool(options.peer):
            raise ValueError("exactly one of --url and --peer must be given")
        figures = asyncio.run(_asked(options, chosen(options.work, options.short)))
    except (ValueError, OSError, ImportError, aiohttp.ClientError, ExceptionGroup) as error:
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        print(f"speech: {cause}", file=sys.stderr)
        return 1
    show(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
