"""A clip is encoded beside the steps of a worker: they, and windows of other streams, are answered meanwhile."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from interfaces import Batch, BatchResult, ClipContext, CodecContext, PoolingTask, RequestID, StepResult, WorkerHello
from interfaces.wire.codec import encode
from model_worker.beside import Beside
from model_worker.cpu.threads import ALL_THREADS, ThreadPool
from model_worker.engine import Engine
from model_worker.loop import Loop
from model_worker.one_shot import TextRunner
from model_worker.speech.clip_thread import ClipThread
from model_worker.speech.codec import SpeechCodec
from model_worker.speech.load_codec import load_codec
from model_worker.speech.speaking_engine import SpeakingEngine
from shared.codec_files import CodecFiles
from shared.speech_tokens import SpeechTokenFiles
from tests.model_worker.speech.tiny_speaker import codebooks_of, tiny_codec
from tests.model_worker.test_loop import Device, Scheduler

SOUND = (0.3 * np.random.default_rng(8).standard_normal(5000)).astype(np.float32)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> SpeechCodec:
    folder = tiny_codec(tmp_path_factory.mktemp("codec") / "dac", "dac")
    codebooks = codebooks_of("dac")
    files = CodecFiles.read(folder)
    speech = SpeechTokenFiles(str(folder), files, ("{text}",), codebooks, (0,) * len(codebooks), (0,), {})
    return load_codec(speech, "cpu", 4096, encodes=True)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    made = Scheduler(tmp_path)
    yield made
    made.close()


def clip_batch(number: int, sound: np.ndarray = SOUND) -> Batch:
    return Batch(1, 0, number, [ClipContext.of_samples(sound, RequestID("a-clip"), "model")])


def held(codec: SpeechCodec) -> tuple[SpeechCodec, threading.Event, threading.Event]:
    """The codec, whose clips wait for an event; the other event says that one waits."""
    go, waits = threading.Event(), threading.Event()
    encode_clip = codec.encode
    assert encode_clip is not None

    def encoded(samples: Tensor) -> Tensor:
        waits.set()
        assert go.wait(90)
        return encode_clip(samples)

    return replace(codec, encode=encoded), go, waits


def test_steps_and_windows_are_answered_while_a_clip_is_encoded(codec: SpeechCodec, scheduler: Scheduler) -> None:
    slow, go, waits = held(codec)
    windows = TextRunner(codec, 0, 0)
    clips = ClipThread(TextRunner(slow, 0, 0).run, torch.device("cpu"))
    device = Device()
    device.go.set()
    hello = WorkerHello("cpu", 0, 0, os.getpid(), 10, 256, 4, 100, 100, "none", "float32", "cpu")
    speaking = SpeakingEngine(cast(Engine, device), windows, clips)
    loop = Loop(speaking, hello, scheduler.endpoint, beside=Beside(clips=clips))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    scheduler.next(WorkerHello)
    router = scheduler._router
    router.send_multipart([scheduler.worker, encode(clip_batch(7))])
    assert waits.wait(60)
    for number in range(10, 30):
        scheduler.send(number)
        assert scheduler.next(StepResult).step == number
    window = CodecContext.of([[1, 2, 3]], PoolingTask.DECODE_SPEECH, width=3)
    router.send_multipart([scheduler.worker, encode(Batch(1, 0, 8, [window]))])
    assert scheduler.next(BatchResult).number == 8
    assert not go.is_set()
    go.set()
    found = scheduler.next(BatchResult)
    assert (found.number, found.errors) == (7, {})
    np.testing.assert_array_equal(found.parts[0].array, codec.run(clip_batch(7).parts[0])[0])
    loop.stop()
    scheduler.send(99)
    thread.join(60)
    assert not thread.is_alive()


def taken(clips: ClipThread) -> list[BatchResult]:
    """The next results of a thread."""
    assert select.select([clips], [], [], 60)[0]
    return clips.take()


def test_steps_have_the_cores_that_a_clip_leaves(codec: SpeechCodec) -> None:
    slow, go, waits = held(codec)
    clips = ClipThread(TextRunner(slow, 0, 0).run, torch.device("cpu"))
    clips.add(clip_batch(1))
    assert waits.wait(60)
    cores = torch.get_num_threads()
    assert ThreadPool.most_threads == max(1, cores - max(1, cores // 2))
    go.set()
    assert [result.number for result in taken(clips)] == [1]
    assert ThreadPool.most_threads == ALL_THREADS


def test_clips_of_another_registration_are_dropped(codec: SpeechCodec) -> None:
    slow, go, waits = held(codec)
    clips = ClipThread(TextRunner(slow, 0, 0).run, torch.device("cpu"))
    for number in (1, 2):
        clips.add(clip_batch(number))
    assert waits.wait(60)
    clips.forget()
    clips.add(clip_batch(3))
    go.set()
    found: list[BatchResult] = []
    while not found:
        found = taken(clips)
    assert [result.number for result in found] == [3]


def test_what_fails_unexpectedly_ends_the_worker(codec: SpeechCodec) -> None:
    def broken(batch: Batch) -> BatchResult:
        raise RuntimeError(f"batch {batch.number}: the device is gone")

    clips = ClipThread(broken, torch.device("cpu"))
    clips.add(clip_batch(4))
    with pytest.raises(RuntimeError, match="batch 4: the device is gone"):
        taken(clips)


def test_a_clip_that_cannot_be_encoded_fails_alone(codec: SpeechCodec) -> None:
    clips = ClipThread(TextRunner(replace(codec, encode=None), 0, 0).run, torch.device("cpu"))
    clips.add(clip_batch(5))
    (result,) = taken(clips)
    assert result.parts == [None]
    assert "start the server with --voice-clips" in result.errors[0]
