"""`python -m api_server.media.media_process`: decodes images, videos and sound beside the API process.

Each is processed in a child of its own, forked from this small process that has loaded the model's image
processor, or what reads sound. Limits on processor time and memory apply to the child, and exceeding them kills only
the child. Reads requests from standard input, and writes answers to standard output (`protocol.py`).
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from api_server.media.decode import (
    MOST_PIXELS_TOGETHER,
    ImageRefused,
    decoded,
    mask_of,
    resized,
    size_of,
    upright_size_of,
)
from api_server.media.log_mel import log_mel
from api_server.media.protocol import SOUND_FIELDS, Answer, EditJob, Job, SoundJob, Start, jobs_at_once, packed
from api_server.media.sound import SoundRefused
from api_server.media.sound import decoded as decoded_sound
from api_server.media.sound import warm_up as warm_up_sound
from api_server.media.video_processors import VideoArrays
from api_server.media.video_sampling import Ask
from api_server.media.videos import open_video, warm_up
from shared.hidden_torch import hide_torch
from shared.limited_children import FAILED, LimitedChildren, Limits
from shared.liveness import become
from shared.pipe_messages import message_unpacker
from shared.recogniser_files import MelForm

if TYPE_CHECKING:
    from api_server.media.processors import Arrays, Processor
    from api_server.media.sound_processors import SoundProcessor

CPU_SECONDS = 20.0
# Limit for a child that waits instead of computing.
WALL_SECONDS = 60.0
# Memory of a child beyond that of this process.
MEMORY_BYTES = 2 << 30
# Reading images yields to token generation, and so does the start of this process.
NICENESS = 5

_TOO_SLOW = f"takes more than {CPU_SECONDS:g} s of processor time to read: send a smaller or shorter one"
_TOO_LARGE = f"takes more than {MEMORY_BYTES >> 20} MB of memory to read: send a smaller one"
_CRASHED = "cannot be read: its decoder crashed, or ran out of memory"


class MediaProcess:
    """Does the jobs that arrive, by `work`; `run` ends when the API process closes its end."""

    def __init__(self, work: Callable[[Any], Answer], answers: Any, is_sound: bool = False) -> None:
        self._work = work
        self._answers = answers
        self._is_sound = is_sound

    def run(self, requests: int, unpacker: msgpack.Unpacker) -> None:
        limits = Limits(
            cpu_seconds=CPU_SECONDS,
            wall_seconds=WALL_SECONDS,
            memory_bytes=MEMORY_BYTES,
            niceness=0,  # this process has been nice since its start
            at_once=jobs_at_once(),
        )
        LimitedChildren(limits, self._work, self._answer).run(requests, unpacker)

    def _answer(self, job: Job | SoundJob | EditJob, result: Answer | None, exit_code: int) -> None:
        answer: Answer = {"error": _why(exit_code, self._is_sound)} if result is None else result
        send(self._answers, answer | {"number": job["number"]})


def outcome(processor: Processor, job: Job) -> Answer:
    """The results of a job, or the `error`."""
    try:
        if job["measure"]:
            return _measured(job["measure"])
        found = _video(processor, job) if job.get("video") else _image(processor, job)
        names = job["segments"]
        arrays = {name: packed(array, names) for name, array in found.arrays.items()}
        return {"run": found.run, "arrays": arrays, "is_video": isinstance(found, VideoArrays) and found.is_video}
    except ImageRefused as refused:
        return {"error": str(refused)}
    except MemoryError:
        return {"error": _TOO_LARGE}


def heard(form: MelForm, job: SoundJob) -> Answer:
    """The features of a sound, or the `error`."""
    try:
        samples = decoded_sound(job["sound"], form.rate, job["most_seconds"])
        features = packed(log_mel(samples, form), job["segments"])
        return {"arrays": {"features": features}, "seconds": len(samples) / form.rate}
    except SoundRefused as refused:
        return {"error": str(refused)}
    except MemoryError:
        return {"error": _TOO_LARGE}


def sampled(rate: int, job: SoundJob) -> Answer:
    """The samples [1, n] of a sound, or the `error`."""
    try:
        samples = decoded_sound(job["sound"], rate, job["most_seconds"])
        return {"arrays": {"features": packed(samples[None], job["segments"])}, "seconds": len(samples) / rate}
    except SoundRefused as refused:
        return {"error": str(refused)}
    except MemoryError:
        return {"error": _TOO_LARGE}


def edited(job: EditJob) -> Answer:
    """The pixels of an image and its mask, or the `error`."""
    which = 0
    try:
        if not job["width"]:
            return {"size": list(upright_size_of(job["picture"]))}
        wanted = (job["width"], job["height"])
        picture = decoded(job["picture"])
        arrays = {"picture": packed(resized(picture, wanted).reshape(wanted[1], -1), job["segments"])}
        if job["mask"]:
            which = 1
            arrays["mask"] = packed(mask_of(job["mask"], picture.size, wanted), job["segments"])
        return {"arrays": arrays}
    except ImageRefused as refused:
        return {"error": str(refused), "index": which}
    except MemoryError:
        return {"error": _TOO_LARGE, "index": which}


def listened(processor: SoundProcessor, job: Job) -> Answer:
    """The arrays of a sound of a conversation, or the `error`."""
    try:
        found, seconds = processor.process(job["image"])
        arrays = {name: packed(array, job["segments"]) for name, array in found.arrays.items()}
        return {"run": found.run, "arrays": arrays, "seconds": seconds}
    except SoundRefused as refused:
        return {"error": str(refused)}
    except MemoryError:
        return {"error": _TOO_LARGE}


def _image(processor: Processor, job: Job) -> Arrays:
    return processor.process(decoded(job["image"]), job["detail"], job["pixels"])


def _video(processor: Processor, job: Job) -> VideoArrays:
    if processor.videos is None:
        raise ImageRefused(f"cannot be used: {processor.facts.no_videos}")
    source = open_video(job["video"], job["is_frames"], job["fps"] or None)
    wish = Ask(job["num_frames"] or None, job["fps"] or None)
    return processor.videos.process(source, wish, job["pixels"])


def _measured(images: list[bytes]) -> Answer:
    counts: list[int] = []
    for i, data in enumerate(images):
        try:
            width, height = size_of(data)
        except ImageRefused as refused:
            return {"error": str(refused), "index": i}
        counts.append(width * height)
        if sum(counts) > MOST_PIXELS_TOGETHER:
            together = f"{sum(counts)} pixels; at most {MOST_PIXELS_TOGETHER} are possible in one request"
            return {"error": f"and those before it have {together}: send fewer or smaller ones", "index": i}
    return {"counts": counts}


def _why(number: int, is_sound: bool) -> str:
    """Why a child has ended with this exit code."""
    if number == FAILED:
        return f"cannot be read: the {'decoder' if is_sound else 'image processor'} failed on it"
    if number == -signal.SIGKILL:
        return f"cannot be read: it took over {WALL_SECONDS:g} s, or too much memory; send a smaller one"
    return _TOO_SLOW if number == -signal.SIGPROF else _CRASHED


def send(answers: Any, message: Any) -> None:
    answers.write(msgpack.packb(message))
    answers.flush()


def main() -> None:
    become("media_process")
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process ends this one
    warnings.simplefilter("ignore")  # they are about metadata of strangers' files
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's prints must not mix with answers
    hide_torch()
    from api_server.media.processors import NoProcessor

    unpacker = message_unpacker()
    requests = sys.stdin.fileno()
    for start in _first(requests, unpacker):
        try:
            work, facts = _loaded(start)
        except NoProcessor as error:
            send(answers, {"error": str(error)})
            continue
        send(answers, facts)
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page
        MediaProcess(work, answers, bool(SOUND_FIELDS & start.keys())).run(requests, unpacker)


def _loaded(start: Start) -> tuple[Callable[[Any], Answer], dict[str, Any]]:
    """What does the jobs, and the facts for the first answer. Raises NoProcessor."""
    if "mel" in start:
        return _hearing(MelForm(**start["mel"]))
    if "most_seconds" in start:
        return _listening(start)
    if "rate" in start:
        warm_up_sound()
        return partial(sampled, start["rate"]), {}
    return (edited, {}) if start.get("edits") else _seeing(start)


def _seeing(start: Start) -> tuple[Callable[[Any], Answer], dict[str, Any]]:
    """What does jobs with images and videos, and the facts of the model's image processor. Raises NoProcessor."""
    from api_server.media.processors import Processor

    processor = Processor(start["model"], start["most_tokens"], start["most_video_tokens"])
    if processor.videos is not None:
        warm_up()
    return partial(outcome, processor), dataclasses.asdict(processor.facts)


def _hearing(form: MelForm) -> tuple[Callable[[Any], Answer], dict[str, Any]]:
    """What does jobs with sound."""
    warm_up_sound()
    # Its imports take a second.
    log_mel(np.zeros(1, np.float32), form)
    return partial(heard, form), {}


def _listening(start: Start) -> tuple[Callable[[Any], Answer], dict[str, Any]]:
    """What does jobs with the sounds of conversations, and the facts of the model. Raises NoProcessor."""
    from api_server.media.sound_processors import SoundProcessor

    processor = SoundProcessor(start["model"], start["most_seconds"])
    warm_up_sound()
    log_mel(np.zeros(1, np.float32), processor.form)
    return partial(listened, processor), dataclasses.asdict(processor.facts)


def _first(requests: int, unpacker: msgpack.Unpacker) -> list[Start]:
    """The first message; empty if there is none."""
    while data := os.read(requests, 1 << 20):
        unpacker.feed(data)
        for start in unpacker:
            return [start]
    return []


if __name__ == "__main__":
    main()
