"""Runs the steps of a model that generates speech tokens, between them the windows that its codec turns into sound, and
beside them the clips that it turns into codes.

Knows which message is for which of the three; knows neither rows nor samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interfaces import GENERATE, Batch, BatchResult, ClipContext, Handover, Step, WorkerHello
from model_worker.engine import Engine
from model_worker.execution.base import Counters
from model_worker.execution.flight import Pending
from model_worker.model import Progress
from model_worker.one_shot import Computed, TextRunner
from model_worker.speech.clip_thread import ClipThread
from shared.speech_tokens import SpeechTokenFiles

if TYPE_CHECKING:
    from model_worker.speech.codec import SpeechCodec


class SpeakingEngine:
    """An engine and a codec as one runner. Results come in the order of the messages, but for those of clips."""

    takes = Step | Batch

    def __init__(self, engine: Engine, windows: TextRunner, clips: ClipThread | None = None) -> None:
        """`clips`: the codec encodes, too."""
        self._engine = engine
        self._windows = windows
        self._clips = clips

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    def begin(self, message: Any) -> Pending | Computed[BatchResult] | None:
        """Launch a step, or decode windows. None for clips, whose result comes from the thread. Raises as the engine
        does."""
        if not isinstance(message, Batch):
            return self._engine.begin(message)
        if self._clips is not None and any(isinstance(part, ClipContext) for part in message.parts):
            self._clips.add(message)
            return None
        return self._windows.begin(message)

    def rest(self) -> None:
        self._engine.rest()

    def beat(self) -> None:
        self._engine.beat()
        self._windows.beat()

    def forget(self) -> None:
        self._engine.forget()
        self._windows.forget()
        if self._clips is not None:
            self._clips.forget()


def with_codec(
    engine: Engine, hello: WorkerHello, model: str, is_local: bool, progress: Progress, voice_clips: bool = False
) -> tuple[Engine | SpeakingEngine, WorkerHello, ClipThread | None]:
    """Return the engine and the hello, with the codec that the checkpoint names, if it names one, and its clips.

    `is_local`: the scheduler is on this host, so that sound may go through shared memory. `voice_clips`: the codec
    encodes, too. ValueError for a codec that cannot be used.
    """
    files = SpeechTokenFiles.read(model)
    if files is None:
        return engine, hello, None
    from model_worker.speech.load_codec import load_codec

    codec = load_codec(files, hello.device, hello.max_model_len, progress, voice_clips)
    windows = TextRunner(codec, hello.index, hello.epoch, Handover() if is_local else None)
    tasks = [GENERATE, *sorted(codec.tasks)]
    clips = _clip_thread(codec, hello) if voice_clips else None
    return SpeakingEngine(engine, windows, clips), replace(hello, tasks=tasks, codec=codec.facts), clips


def _clip_thread(codec: SpeechCodec, hello: WorkerHello) -> ClipThread:
    # Codes are few enough for a message.
    return ClipThread(TextRunner(codec, hello.index, hello.epoch).run, codec.device)
