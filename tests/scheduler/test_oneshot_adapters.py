"""Texts of adapters in the scheduler: each is computed with the content that its request was prepared for."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest

from interfaces import (
    AdapterFailed,
    AdapterLoaded,
    AdapterOrder,
    Batch,
    BatchResult,
    DropAdapter,
    Finish,
    LoadAdapter,
    LoRAOperation,
    LoRARequest,
    LoRAStatus,
    PooledValues,
    PoolingContext,
    PoolingTask,
    SchedulingOptions,
    Submit,
    decode,
    encode,
)
from scheduler.adapter_registry import LATE_SECONDS
from tests.scheduler.text_yard import REPLICA, Asked, TextYard, hello

SIZE = 10
OPERATOR = b"operator"


class AdapterTextYard(TextYard):
    """Workers whose values are shifted by the content of the adapter, which is a number. They read one at a time."""

    def __init__(self, memory: int = 2 * SIZE, workers: int = 1, seed: int = 0) -> None:
        self.memory = memory
        self.disk: dict[str, int] = {}
        self.loaded: dict[int, dict[int, int]] = defaultdict(dict)
        self.mail: dict[int, deque[Batch | LoadAdapter | DropAdapter]] = defaultdict(deque)
        self.contents: dict[int, int] = {}
        self.statuses: list[LoRAStatus] = []
        # Contents in the order in which batches used them.
        self.computed: list[int] = []
        super().__init__(workers=workers, seed=seed)

    def start_worker(self, index: int, tasks: tuple[str, ...] = ("embed",)) -> None:
        self.epochs[index] += 1
        self.mail[index].clear()
        self.loaded[index] = {}
        described = replace(hello(index, self.epochs[index], tasks), adapter_memory=self.memory)
        assert self.scheduler.worker_hello(described)

    def load(self, name: str, content: int, **options: bool) -> LoRAStatus:
        path = f"/{name}/{content}"
        self.disk[path] = content
        order = AdapterOrder(1, LoRARequest(LoRAOperation.LOAD, name, path), **options)
        self.scheduler.adapters.obey(OPERATOR, order)
        self.drain()
        return self.statuses.pop()

    def ask(self, name: str, texts: list[list[int]], priority: int = 0) -> int:
        digests = {one.name: one.digest for one in self.scheduler.adapters.status() if one.state == 1}
        digest = digests[name] if name else ""
        handle = len(self.asked)
        self.contents[handle] = int(digest or 0)
        context = PoolingContext.of(
            texts, PoolingTask.EMBED, request_id=f"r{handle}", adapter=name, adapter_digest=digest
        )
        self.submit_context(handle, context, priority)
        return handle

    def submit_context(self, handle: int, context: PoolingContext, priority: int = 0) -> None:
        self.asked[handle] = Asked(context)
        scheduling = SchedulingOptions(priority=priority)
        self.scheduler.submit(REPLICA, decode(encode(Submit(handle, context, scheduling))))
        self.read()

    def turn(self) -> bool:
        while True:
            batches = self.scheduler.next_batches()
            # A batch comes after the messages about adapters that it needs.
            found = [*self.scheduler.adapters.take_messages(), *batches]
            for index, message in found:
                self.mail[index].append(decode(encode(message)))
            if not found:
                break
        self._check_memory()
        busy = [index for index, mail in self.mail.items() if mail and index in self.scheduler.workers]
        if busy:
            self._work(self.random.choice(busy))
        self.read()
        self.statuses += [answer.status for _, answer in self.scheduler.adapters.take_answers()]
        return bool(busy)

    def _check_memory(self) -> None:
        for loaded in self.loaded.values():
            # One may be read to be checked, beyond what fits.
            assert len(loaded) * SIZE <= self.memory + SIZE

    def _work(self, index: int) -> None:
        message = self.mail[index].popleft()
        loaded = self.loaded[index]
        if isinstance(message, DropAdapter):
            loaded.pop(message.handle, None)
        elif isinstance(message, LoadAdapter):
            whose = message.incarnation, message.epoch, index, message.handle
            content = self.disk.get(message.path)
            if content is None:
                self.scheduler.adapters.failed(AdapterFailed(*whose, "", "there is nothing", missing=True))
                return
            loaded[message.handle] = content
            self.scheduler.adapters.loaded(AdapterLoaded(*whose, str(content), 8, SIZE))
        else:
            self.clock.advance(1e-3)
            self.scheduler.batch_result(decode(encode(self._run(message, index))))

    def _run(self, batch: Batch, index: int) -> BatchResult:
        parts: list[PooledValues | None] = []
        for part in batch.parts:
            handle = part.adapter_handle
            content = self.loaded[index][handle] if handle else 0
            self.computed.append(content)
            rows = [np.array([text.sum(), len(text), content, 0], np.float32) for text in part.texts()]
            parts.append(PooledValues(np.stack(rows), np.ones(len(part), np.int32)))
        return BatchResult(batch.incarnation, batch.epoch, index, batch.number, parts, {}, 1)

    def check(self, handle: int) -> None:
        asked = self.asked[handle]
        assert sorted(asked.values) == list(range(len(asked.context))), handle
        for place, text in enumerate(asked.context.texts()):
            assert asked.values[place].tolist() == [text.sum(), len(text), self.contents[handle], 0]


def texts(count: int, length: int = 5, first: int = 1) -> list[list[int]]:
    return [[first + i + j for j in range(length)] for i in range(count)]


def test_texts_of_adapters_and_of_the_model_get_their_own_values() -> None:
    yard = AdapterTextYard(workers=2)
    assert yard.load("a", 1) is yard.load("b", 2) is LoRAStatus.SUCCESS
    asked = [yard.ask(name, texts(20, first=i)) for i, name in enumerate(["", "a", "b", "a", ""] * 3)]
    yard.drain()
    for handle in asked:
        yard.check(handle)
    assert all(one.requests == 0 for one in yard.scheduler.adapters.status())


@pytest.mark.parametrize("seed", range(4))
def test_more_adapters_than_fit_are_all_served_also_through_deaths(seed: int) -> None:
    yard = AdapterTextYard(memory=SIZE, workers=2, seed=seed)
    for content in range(1, 6):
        assert yard.load(f"a{content}", content) is LoRAStatus.SUCCESS
    asked = []
    for round_ in range(30):
        name = yard.random.choice(["", *(f"a{content}" for content in range(1, 6))])
        asked.append(yard.ask(name, texts(yard.random.randrange(1, 40), first=round_)))
        for _ in range(yard.random.randrange(5)):
            yard.turn()
        if round_ % 10 == 9:
            index = yard.random.randrange(2)
            yard.kill_worker(index, blamed=False)
            yard.start_worker(index)
    yard.drain()
    for handle in asked:
        yard.check(handle)


def test_an_adapter_without_room_is_not_overtaken_for_ever() -> None:
    yard = AdapterTextYard(memory=SIZE)
    yard.load("a", 1)
    yard.load("b", 2)
    busy = [yard.ask("a", texts(50)) for _ in range(3)]
    wanted = yard.ask("b", texts(1))
    for _ in range(400):
        # As long as it waits, others keep coming.
        if yard.asked[wanted].complete:
            break
        busy.append(yard.ask("a", texts(3)))
        yard.turn()
    yard.check(wanted)
    yard.drain()
    for handle in busy:
        yard.check(handle)


def test_adapters_are_read_by_the_priority_of_their_requests() -> None:
    """The texts that came first hold nothing up whose priority is higher, although there is room for one adapter."""
    yard = AdapterTextYard(memory=SIZE)
    for content, name in enumerate("abcd", 1):
        yard.load(name, content)
    asked = [yard.ask("a", texts(2)), yard.ask("b", texts(2), -1), yard.ask("c", texts(2)), yard.ask("d", texts(2), 2)]
    yard.drain()
    for handle in asked:
        yard.check(handle)
    assert list(dict.fromkeys(yard.computed)) == [4, 1, 3, 2]


def test_requests_keep_the_content_that_was_unloaded_and_late_ones_are_refused() -> None:
    yard = AdapterTextYard()
    yard.load("a", 1)
    first = yard.ask("a", texts(200))
    yard.turn()
    late = yard.asked[first].context
    yard.scheduler.adapters.obey(OPERATOR, AdapterOrder(2, LoRARequest(LoRAOperation.UNLOAD, "a")))
    yard.drain()
    yard.check(first)
    yard.clock.advance(LATE_SECONDS)
    yard.scheduler.adapters.sweep()
    yard.drain()
    assert yard.scheduler.adapters.status() == []
    assert yard.loaded[0] == {}
    yard.submit_context(99, late)
    assert yard.asked[99].finished == Finish.FAILED
    assert "was unloaded, or has another content now" in yard.asked[99].error


def test_an_adapter_whose_files_have_gone_fails_only_its_own_requests() -> None:
    yard = AdapterTextYard(memory=SIZE)
    yard.load("a", 1)
    # It leaves memory for this one.
    yard.load("b", 2)
    del yard.disk["/a/1"]
    lost = yard.ask("a", texts(2))
    own = yard.ask("b", texts(2))
    plain = yard.ask("", texts(2))
    yard.drain()
    assert yard.asked[lost].finished == Finish.FAILED
    assert "there is nothing" in yard.asked[lost].error
    yard.check(own)
    yard.check(plain)
