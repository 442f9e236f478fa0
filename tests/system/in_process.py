"""The whole path behind the API in one process.

The real scheduler, the real engines, every message through the codec.
"""

from __future__ import annotations

import select
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    NO_IMAGES,
    Finish,
    Ready,
    SamplingParams,
    SchedulingOptions,
    Step,
    StepResult,
    Submit,
    TextContext,
    WorkerHello,
    decode,
    encode,
)
from interfaces.base.log_probabilities import LogProbabilities
from model_worker.backends.base import Backend
from model_worker.drafters.base import Drafter, ModelDrafter
from model_worker.drafters.chosen import without_models
from model_worker.drafters.eagle3_head import Eagle3Head
from model_worker.engine import Engine
from model_worker.execution import executors_for
from model_worker.execution.base import DeviceStep, WorkerIdentity
from model_worker.execution.flight import Pending
from model_worker.execution.images import encode_queue, image_rows
from model_worker.grammar.masks import Masks
from model_worker.loading.draft import DraftModelGuesser, HeadGuesser
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.rows import WorkerRows
from model_worker.runner import ModelRunner
from model_worker.sampling.registry import Processor
from model_worker.sampling.sampler import SamplerRows
from scheduler.core import Scheduler
from scheduler.limits import Limits

REPLICA = b"replica"
# Seconds within which an image of a tiny model is encoded on any machine.
IMAGE_SECONDS = 120.0


@dataclass(frozen=True)
class Shape:
    """What one worker can hold, and how it is driven. The defaults force chunks, preemption and block boundaries."""

    num_blocks: int = 48
    block_size: int = 4
    max_rows: int = 16
    max_model_len: int = 72
    max_batch_tokens: int = 32
    overlap: bool = True
    workers: int = 1
    prefix_cache: bool = True
    backend: str = "auto"
    device_overlap: str = "off"
    """As `executors_for` has it; with "cuda", torch's CPU is the device."""
    most_guesses: int = 0
    learns: bool = False
    drafters: Sequence[Drafter] | None = None
    draft: LoadedModel | None = None
    head: Eagle3Head | None = None
    processors: Mapping[str, Processor] = field(default_factory=dict)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: int = Finish.ACTIVE
    error: str = ""
    reports: dict[int, LogProbabilities] = field(default_factory=dict)
    """By position; each may arrive once only."""
    hidden: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """As reports."""


def load(path: Path, quantization: str = "none", dtype: str = "float32") -> LoadedModel:
    return load_model(path, dtype, "cpu", lambda *_: None, quantization=quantization)


class InProcessServer:
    """Submit, then `run` until everything is answered."""

    def __init__(self, loaded: LoadedModel, shape: Shape, masks: Sequence[Masks] = ()) -> None:
        """`masks`, one for each worker, are for requests with a grammar; they belong to the caller."""
        limits = Limits(
            max_running=shape.max_rows,
            max_batch_tokens=shape.max_batch_tokens,
            max_queued=1000,
            max_model_len=shape.max_model_len,
            steps_in_flight=2 if shape.overlap else 1,
            most_guesses=shape.most_guesses,
            prefix_cache=shape.prefix_cache,
        )
        self.scheduler = Scheduler(limits, incarnation=1)
        self.answers: dict[int, Answer] = defaultdict(Answer)
        self.engines: dict[int, Engine] = {}
        self.backends: dict[int, Backend] = {}
        self.in_flight: dict[int, deque[Step]] = defaultdict(deque)
        self.pending: dict[int, deque[Pending]] = defaultdict(deque)
        for made in masks:
            for row in range(shape.max_rows):  # what another server has left there
                made.drop(row)
        for index in range(shape.workers):
            shared = _device_step(loaded, shape, index, masks[index] if masks else None)
            self.backends[index] = shared.backend
            most = shape.most_guesses
            drafters = without_models("text,suffix") if shape.drafters is None else shape.drafters
            models: list[ModelDrafter] = []
            if shape.draft is not None:
                models.append(DraftModelGuesser(shape.draft).drafter(shared, shape.num_blocks))
            if shape.head is not None:
                models.append(HeadGuesser(shape.head, "DIR").drafter(shared, shape.num_blocks))
            executors = executors_for(shared, shape.device_overlap, most, shape.learns, drafters, models)
            self.engines[index] = Engine(shared, executors)
            self.scheduler.worker_hello(_hello(loaded, shape, index, shared.backend.row_invariant))

    def submit(self, prompt: Sequence[int], params: SamplingParams, **fields: Any) -> int:
        """`fields` are further ones of the context."""
        return self.submit_context(TextContext.from_prompt(prompt, params, **fields))

    def submit_context(self, context: TextContext, scheduling: SchedulingOptions | None = None) -> int:
        handle = len(self.answers)
        self.answers[handle] = Answer()
        message = decode(encode(Submit(handle, context, scheduling or SchedulingOptions())))
        assert isinstance(message, Submit)
        self.scheduler.submit(REPLICA, message)
        return handle

    def run(self) -> list[Answer]:
        while self.turn() or self._await_images():
            pass
        return [self.answers[handle] for handle in sorted(self.answers)]

    def turn(self) -> bool:
        for index, step in self.scheduler.next_steps():
            message = decode(encode(step))
            assert isinstance(message, Step)
            self.in_flight[index].append(message)
        has_images = self._take_images()
        busy = [index for index in self.engines if self.in_flight[index] or self.pending[index]]
        for index in busy:
            result = self._next_result(index)
            if result is not None:
                self.scheduler.step_result(decode(encode(result)))
        self._read_news()
        return bool(busy) or has_images

    def _await_images(self) -> bool:
        """Wait until images are encoded that rows wait for. False if no row waits for one."""
        if not any(worker.images.encoding() for worker in self.scheduler.workers.values()):
            return False
        queues = [engine.encoding for engine in self.engines.values() if engine.encoding is not None]
        assert select.select(queues, [], [], IMAGE_SECONDS)[0], "the images of rows were not encoded"
        self._take_images()
        return True

    def _take_images(self) -> bool:
        """Tell the scheduler of images that are encoded. False if there are none."""
        found = False
        for index, engine in self.engines.items():
            ready = [] if engine.encoding is None else engine.encoding.take()
            if not ready:
                continue
            message = Ready(
                1,
                0,
                index,
                np.array([row.row for row in ready], np.int32),
                np.array([row.joined for row in ready], np.int64),
                np.array([row.upto for row in ready], np.int32),
                {row.row: row.error for row in ready if row.error is not None},
            )
            self.scheduler.images_ready(decode(encode(message)))
            found = True
        return found

    def _next_result(self, index: int) -> StepResult | None:
        engine = self.engines[index]
        sent = self.in_flight[index]
        launched = self.pending[index]
        # As in the worker's loop, a step's result is read when the next one has begun, or when there is none.
        if sent:
            pending = engine.begin(sent.popleft())
            launched.append(pending)
            if len(launched) == 1 and not pending.done:
                return None
        return launched.popleft().result()

    def _read_news(self) -> None:
        for _, results in self.scheduler.take_results():
            logprobs = [0.0] * len(results.handles) if results.logprobs is None else results.logprobs.tolist()
            columns = (results.handles.tolist(), results.tokens.tolist(), results.finished.tolist(), logprobs)
            for handle, token, finished, logprob in zip(*columns, strict=True):
                answer = self.answers[handle]
                if token >= 0:
                    answer.tokens.append(token)
                    answer.logprobs.append(logprob)
                answer.finished = finished
            if results.reports is not None:
                assert results.reports.consistent
                for handle, position, report in results.reports.entries():
                    assert position not in self.answers[handle].reports
                    self.answers[handle].reports[position] = report
            if results.hidden is not None:
                assert results.hidden.consistent
                for handle, position, vector in results.hidden.entries():
                    assert position not in self.answers[handle].hidden
                    self.answers[handle].hidden[position] = vector
            for handle, error in results.errors.items():
                self.answers[handle].error = error.message


def _device_step(loaded: LoadedModel, shape: Shape, index: int, masks: Masks | None) -> DeviceStep:
    runner = ModelRunner(loaded, shape.num_blocks, shape.block_size, shape.backend, max_rows=shape.max_rows)
    rows = WorkerRows(shape.max_rows, shape.max_model_len, shape.block_size, shape.num_blocks)
    sampler = SamplerRows(shape.max_rows, loaded.vocab_size, loaded.device, shape.processors)
    images = image_rows(loaded)
    step = DeviceStep(rows, sampler, runner.backend, WorkerIdentity(index, 0), masks, images)
    step.encoding = None if images is None else encode_queue(images)
    return step


def _hello(loaded: LoadedModel, shape: Shape, index: int, row_invariant: bool) -> WorkerHello:
    embedding: Any = loaded.model.get_input_embeddings()
    return WorkerHello(
        device="cpu",
        index=index,
        epoch=0,
        pid=0,
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_rows=shape.max_rows,
        max_model_len=shape.max_model_len,
        vocab_size=loaded.vocab_size,
        architecture=loaded.architecture,
        dtype="float32",
        attention=shape.backend,
        hidden_size=int(embedding.weight.shape[1]),
        row_invariant=row_invariant,
        guesses=row_invariant,
        images=NO_IMAGES if loaded.encoder is None else int(loaded.encoder.family.sight),
        reuses_prefixes=loaded.recurrent is None,
    )
