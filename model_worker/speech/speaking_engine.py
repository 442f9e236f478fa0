"""Runs the steps of a model that generates speech tokens, and beside them the windows that its codec turns into sound.

Knows which message is for which of the two; knows neither rows nor samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from interfaces import GENERATE, Batch, BatchResult, Handover, Step, WorkerHello
from model_worker.engine import Engine
from model_worker.execution.base import Counters
from model_worker.execution.flight import Pending
from model_worker.model import Progress
from model_worker.one_shot import Computed, TextRunner
from shared.speech_tokens import SpeechTokenFiles


class SpeakingEngine:
    """An engine and a codec as one runner. Results come in the order of the messages."""

    takes = Step | Batch

    def __init__(self, engine: Engine, windows: TextRunner) -> None:
        self._engine = engine
        self._windows = windows

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    def begin(self, message: Any) -> Pending | Computed[BatchResult]:
        """Launch a step, or decode windows. Raises as the engine does."""
        return self._windows.begin(message) if isinstance(message, Batch) else self._engine.begin(message)

    def rest(self) -> None:
        self._engine.rest()

    def beat(self) -> None:
        self._engine.beat()
        self._windows.beat()

    def forget(self) -> None:
        self._engine.forget()
        self._windows.forget()


def with_codec(
    engine: Engine, hello: WorkerHello, model: str, is_local: bool, progress: Progress, voice_clips: bool = False
) -> tuple[Engine | SpeakingEngine, WorkerHello]:
    """Return the engine and the hello, with the codec that the checkpoint names, if it names one.

    `is_local`: the scheduler is on this host, so that sound may go through shared memory. `voice_clips`: the codec
    encodes, too. ValueError for a codec that cannot be used.
    """
    files = SpeechTokenFiles.read(model)
    if files is None:
        return engine, hello
    from model_worker.speech.load_codec import load_codec

    codec = load_codec(files, hello.device, hello.max_model_len, progress, voice_clips)
    windows = TextRunner(codec, hello.index, hello.epoch, Handover() if is_local else None)
    tasks = [GENERATE, *sorted(codec.tasks)]
    return SpeakingEngine(engine, windows), replace(hello, tasks=tasks, codec=codec.facts)
