"""A scheduler with workers that compute texts. Their values follow from the tokens, so every answer can be checked."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    Batch,
    BatchResult,
    Finish,
    PooledValues,
    PoolingContext,
    PoolingTask,
    SchedulingOptions,
    Submit,
    WorkerHello,
    decode,
    encode,
)
from scheduler.core import Scheduler
from scheduler.limits import Limits
from tests.scheduler.clock import Clock

REPLICA = b"replica"
VOCAB = 1000
LIMITS = Limits(
    max_running=64, max_batch_tokens=16, max_queued=1000, max_model_len=None, steps_in_flight=2, prefix_cache=True
)


def hello(index: int, epoch: int, tasks: tuple[str, ...] = ("embed",)) -> WorkerHello:
    return WorkerHello(
        device="cpu",
        index=index,
        epoch=epoch,
        pid=0,
        num_blocks=0,
        block_size=0,
        max_rows=0,
        max_model_len=512,
        vocab_size=VOCAB,
        architecture="Simulated",
        dtype="float32",
        attention="none",
        hidden_size=4,
        tasks=list(tasks),
    )


def vector_of(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.array([tokens.sum(), len(tokens), tokens[0], tokens[-1]], np.float32)


def run(batch: Batch, index: int) -> BatchResult:
    """The batch's values, as a worker answers them."""
    parts: list[PooledValues | None] = [
        PooledValues(np.stack([vector_of(text) for text in part.texts()]), np.ones(len(part), np.int32))
        for part in batch.parts
    ]
    return BatchResult(batch.incarnation, batch.epoch, index, batch.number, parts, {}, 1)


@dataclass
class Asked:
    """A request, and the values that have come for it by text."""

    context: PoolingContext
    values: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    finished: int = Finish.ACTIVE
    error: str = ""

    @property
    def complete(self) -> bool:
        return len(self.values) == len(self.context)

    def check(self) -> None:
        """Every text is answered, and by its own values."""
        assert sorted(self.values) == list(range(len(self.context)))
        for i, text in enumerate(self.context.texts()):
            np.testing.assert_array_equal(self.values[i], vector_of(text))


class TextYard:
    """A scheduler and pooling workers, with batches in flight that are answered by hand or in any order."""

    def __init__(self, limits: Limits = LIMITS, workers: int = 1, seed: int = 0) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(limits, 1, self.clock)
        self.random = random.Random(seed)
        self.in_flight: dict[int, deque[Batch]] = defaultdict(deque)
        self.epochs: Counter[int] = Counter()
        self.asked: dict[int, Asked] = {}
        self.sent: list[Batch] = []
        # Seconds that a token takes.
        self.token_seconds = 1e-5
        for index in range(workers):
            self.start_worker(index)

    def start_worker(self, index: int, tasks: tuple[str, ...] = ("embed",)) -> None:
        self.epochs[index] += 1
        self.in_flight[index].clear()
        assert self.scheduler.worker_hello(hello(index, self.epochs[index], tasks))

    def kill_worker(self, index: int, blamed: bool = True) -> None:
        self.in_flight[index].clear()
        self.scheduler.lose_worker(index, "died", blamed)

    def submit(self, texts: list[list[int]], scheduling: SchedulingOptions | None = None, again: bool = False) -> int:
        handle = len(self.asked)
        context = PoolingContext.of(texts, PoolingTask.EMBED, request_id=f"r{handle}")
        self.asked[handle] = Asked(context)
        message = decode(encode(Submit(handle, context, scheduling or SchedulingOptions(), again)))
        self.scheduler.submit(REPLICA, message)
        self.read()
        return handle

    def bulk(self, count: int, length: int, scheduling: SchedulingOptions | None = None) -> int:
        """Submit `count` texts of `length` tokens."""
        return self.submit([[(i + j) % VOCAB for j in range(length)] for i in range(count)], scheduling)

    def send(self) -> list[Batch]:
        """What the scheduler sends now."""
        sent = []
        while found := self.scheduler.next_batches():
            for index, batch in found:
                received = decode(encode(batch))
                self.in_flight[index].append(received)
                sent.append(received)
        self.sent += sent
        return sent

    def answer(self, index: int = 0) -> Batch:
        """Answer the oldest batch of a worker, in the time that its tokens take."""
        batch = self.in_flight[index].popleft()
        self.clock.advance(self.token_seconds * sum(len(part.tokens) for part in batch.parts))
        self.scheduler.batch_result(decode(encode(run(batch, index))))
        self.read()
        return batch

    def turn(self) -> bool:
        """One turn of the loop and one answer of a random worker; False when nothing is left to do."""
        self.send()
        busy = [index for index, batches in self.in_flight.items() if batches and index in self.scheduler.workers]
        if busy:
            self.answer(self.random.choice(busy))
        self.read()
        return bool(busy)

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.turn():
                return
        raise AssertionError("the scheduler makes no progress")

    def read(self) -> None:
        for identity, vectors in self.scheduler.take_vectors():
            assert identity == REPLICA
            asked = self.asked[vectors.handle]
            assert not asked.finished, "values after the end"
            for i, values in enumerate(vectors.values.texts(), vectors.first):
                assert i not in asked.values, "a text was answered twice"
                asked.values[i] = values[0]
        for identity, results in self.scheduler.take_results():
            assert identity == REPLICA
            for handle, finished in zip(results.handles.tolist(), results.finished.tolist(), strict=True):
                assert not self.asked[handle].finished
                assert not self.asked[handle].complete
                self.asked[handle].finished = finished
                self.asked[handle].error = results.errors[handle].message if handle in results.errors else ""


def requests_in(batch: Batch) -> list[str]:
    return [str(part.request_id) for part in batch.parts]


def tokens_in(batch: Batch) -> int:
    return sum(len(part.tokens) for part in batch.parts)
