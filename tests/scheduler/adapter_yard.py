"""A scheduler with simulated workers whose K/V depends on the adapter, and adapters that are contents of a mapping."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

from interfaces import (
    AdapterFailed,
    AdapterLoaded,
    AdapterOrder,
    AdapterStatus,
    DropAdapter,
    LoadAdapter,
    LoRAOperation,
    LoRARequest,
    LoRAStatus,
    SamplingParams,
    ShipKv,
    Step,
    Submit,
    TakeKv,
    TextContext,
    decode,
    encode,
)
from scheduler.adapter_registry import LATE_SECONDS
from tests.scheduler.simulated_worker import VOCAB, SimulatedWorker, naive_generate, next_token
from tests.scheduler.test_core import LIMITS, REPLICA, Yard

OPERATOR = b"operator"
# Contents are numbers, and a content has this size.
SIZE = 10
# The content of the base model.
BASE = 0


class AdapterWorker(SimulatedWorker):
    """Stores token ids that are shifted by the content of their row's adapter. `disk` has contents by path."""

    def __init__(self, index: int, epoch: int, memory: int, disk: dict[str, int], **shape: int) -> None:
        super().__init__(index, epoch, **shape)
        self.hello = replace(self.hello, adapter_memory=memory)
        self.disk = disk
        self.loaded: dict[int, int] = {}
        self.reading: deque[LoadAdapter] = deque()

    def obey(self, sent: LoadAdapter | DropAdapter) -> None:
        message = decode(encode(sent))
        if isinstance(message, LoadAdapter):
            assert message.handle not in self.loaded, "an adapter is loaded twice"
            self.reading.append(message)
        elif message.handle in self.loaded:
            del self.loaded[message.handle]
        else:
            self.reading = deque(one for one in self.reading if one.handle != message.handle)

    def read(self) -> AdapterLoaded | AdapterFailed:
        """Read the next adapter."""
        message = self.reading.popleft()
        whose = message.incarnation, message.epoch, self.hello.index, message.handle
        content = self.disk.get(message.path)
        if content is None:
            return AdapterFailed(*whose, "", "there is nothing", missing=True)
        if message.digest and message.digest != str(content):
            return AdapterFailed(*whose, str(content), "other content")
        self.loaded[message.handle] = content
        return AdapterLoaded(*whose, str(content), 8, SIZE)

    def _compute(self, row: int, count: int) -> tuple[int, int] | None:
        handle = self.joins[row].adapter
        assert not handle or handle in self.loaded, "a row is computed without its adapter"
        content = self.loaded[handle] if handle else BASE
        tokens, table, size = self.tokens[row], self.tables[row], self.hello.block_size
        start = self.computed[row]
        for position in range(start, start + count):
            self.memory[table[position // size], position % size] = tokens[position] + content * VOCAB
        self.computed[row] = start + count
        cached = [int(self.memory[table[p // size], p % size]) - content * VOCAB for p in range(start + count)]
        assert cached == tokens[: start + count], "the blocks of a row were computed for another content"
        if start + count < len(tokens):
            return None
        tokens.append(next_token(cached, self.joins[row].sampling.seed + 1000 * content))
        return row, tokens[-1]


class AdapterYard(Yard):
    """Messages to each worker arrive in their order; an adapter is read some time later."""

    def __init__(self, memory: int = 3 * SIZE, workers: int = 1, seed: int = 0, **shape: int) -> None:
        self.memory = memory
        self.disk: dict[str, int] = {}
        self.mail: dict[int, deque[Any]] = defaultdict(deque)
        self.answers: dict[int, LoRAStatus] = {}
        self.texts: dict[int, str] = {}
        self.asked: dict[int, tuple[list[int], int]] = {}
        self._orders = 0
        super().__init__(LIMITS, workers, seed, **shape)

    def start_worker(self, index: int, epoch: int) -> None:
        self.workers[index] = AdapterWorker(index, epoch, self.memory, self.disk, **self.shape)
        self.mail[index].clear()
        assert self.scheduler.worker_hello(self.workers[index].hello)

    def worker(self, index: int = 0) -> AdapterWorker:
        worker = self.workers[index]
        assert isinstance(worker, AdapterWorker)
        return worker

    def adapters(self) -> dict[str, AdapterStatus]:
        return {one.name: one for one in self.scheduler.adapters.status() if one.state == 1}

    def order(self, operation: LoRAOperation, name: str, path: str | None = None, **options: bool) -> int:
        """Give an order. Returns its number, by which `answers` has its outcome later."""
        self._orders += 1
        order = AdapterOrder(self._orders, LoRARequest(operation, name, path), **options)
        self.scheduler.adapters.obey(OPERATOR, decode(encode(order)))
        self._read_answers()
        return self._orders

    def load(self, name: str, content: int, path: str = "", **options: bool) -> LoRAStatus:
        """Load an adapter, and wait for it."""
        path = path or f"/{name}/{content}"
        self.disk[path] = content
        number = self.order(LoRAOperation.LOAD, name, path, **options)
        while number not in self.answers and self.turn():
            pass
        return self.answers[number]

    def ask(self, handle: int, prompt: list[int], new_tokens: int, adapter: str = "") -> None:
        digest = self.adapters()[adapter].digest if adapter else ""
        self.asked[handle] = prompt, int(digest or BASE)
        params = SamplingParams(seed=handle, max_new_tokens=new_tokens)
        context = TextContext.from_prompt(prompt, params, adapter=adapter, adapter_digest=digest)
        self.max_new[handle] = new_tokens
        self.scheduler.submit(REPLICA, Submit(handle, context))

    def expected(self, handle: int) -> list[int]:
        prompt, content = self.asked[handle]
        return naive_generate(prompt, handle + 1000 * content, [], len(prompt) + self.max_new[handle])

    def restart_worker(self, index: int = 0, memory: int | None = None) -> None:
        """Lose a worker and start its next epoch, which may have another memory for adapters."""
        self.scheduler.lose_worker(index, blamed=False)
        before = self.memory
        self.memory = before if memory is None else memory
        self.start_worker(index, self.workers[index].hello.epoch + 1)
        self.memory = max(before, self.memory)

    def settle(self) -> None:
        """Let everything end, and the adapters go that have lost their names."""
        self.drain()
        self.clock.advance(LATE_SECONDS)
        self.scheduler.adapters.sweep()
        self.drain()

    def turn(self) -> bool:
        steps = self.scheduler.next_steps()
        messages = [*self.scheduler.adapters.take_messages(), *steps, *self.scheduler.next_shipments()]
        for index, message in messages:
            self.mail[index].append(message)
        self._check_memory()
        busy = [index for index in self.workers if self.mail[index] or self.worker(index).reading]
        if busy:
            self._let_work(self.random.choice(busy))
        self._read_results()
        self._read_answers()
        self.check_blocks()
        return bool(busy)

    def _check_memory(self) -> None:
        """Sizes are unknown before the first worker has read an adapter, so one may be too many for a while."""
        for index in self.workers:
            idle = not self.mail[index] and not self.worker(index).reading
            assert len(self.worker(index).loaded) * SIZE <= self.memory + (0 if idle else SIZE)

    def _let_work(self, index: int) -> None:
        worker = self.worker(index)
        self.clock.advance(0.01)
        if worker.reading and (not self.mail[index] or self.random.random() < 0.3):
            answer = decode(encode(worker.read()))
            registry = self.scheduler.adapters
            registry.loaded(answer) if isinstance(answer, AdapterLoaded) else registry.failed(answer)
            return
        message = self.mail[index].popleft()
        if isinstance(message, Step):
            self.scheduler.step_result(decode(encode(worker.run(message))))
        elif isinstance(message, ShipKv | TakeKv):
            self.scheduler.kv_shipped(decode(encode(worker.ship(message))))
        else:
            worker.obey(message)

    def _read_answers(self) -> None:
        for identity, answer in self.scheduler.adapters.take_answers():
            assert identity == OPERATOR
            self.answers[answer.number] = answer.status
            self.texts[answer.number] = answer.text
