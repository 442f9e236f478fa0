"""Adapters that are read beside steps: answers, drops in the middle, another scheduler, and errors of files."""

from __future__ import annotations

import select
import threading

import pytest
import torch
from torch import Tensor

from interfaces import AdapterFailed, AdapterLoaded, DropAdapter, LoadAdapter
from model_worker.adapter_loads import AdapterLoads
from model_worker.backends.base import AdapterFacts, Backend
from model_worker.batch import ForwardBatch

MEMORY = 100


class Shelf(Backend):
    """A backend whose adapters are the numbers of their paths. `gate` holds reading back while it is clear."""

    takes_adapters = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.vocab_size = 1
        self.held: dict[int, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()

    def logits(self, batch: ForwardBatch) -> Tensor:
        raise NotImplementedError

    def load_adapter(self, handle: int, path: str) -> AdapterFacts:
        self.began.set()
        assert self.gate.wait(60)
        if path == "missing":
            raise FileNotFoundError("there is no adapter")
        if path == "broken":
            raise ValueError("rank is 0: save it again")
        if path == "full":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
        if path == "bug":
            raise KeyError("x")
        self.held[handle] = path
        if path == "half":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return AdapterFacts(f"digest {path}", 4, int(path))

    def drop_adapter(self, handle: int) -> None:
        self.held.pop(handle, None)


def answers(loads: AdapterLoads, count: int) -> list[AdapterLoaded | AdapterFailed]:
    found: list[AdapterLoaded | AdapterFailed] = []
    while len(found) < count:
        assert select.select([loads], [], [], 10)[0], f"only {found} of {count} answers came"
        found += loads.take()
    return found


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def loads(shelf: Shelf) -> AdapterLoads:
    return AdapterLoads(shelf, epoch=2, index=1, memory=MEMORY)


def test_adapters_are_read_in_order_and_answered(loads: AdapterLoads, shelf: Shelf) -> None:
    for handle, path in enumerate(["5", "7"], 1):
        loads.obey(LoadAdapter(9, 2, handle, path))
    assert answers(loads, 2) == [
        AdapterLoaded(9, 2, 1, 1, "digest 5", 4, 5),
        AdapterLoaded(9, 2, 1, 2, "digest 7", 4, 7),
    ]
    loads.obey(DropAdapter(9, 2, 1))
    assert shelf.held == {2: "7"}


@pytest.mark.parametrize(
    ("path", "reason", "missing"),
    [
        ("missing", "there is no adapter", True),
        ("broken", "rank is 0: save it again", False),
        (
            "full",
            "the GPU has no memory left for it: unload another adapter, or start the server with more lora_memory and "
            "kv_memory auto, or with less kv_memory (CUDA out of memory. Tried to allocate 2 GiB.)",
            False,
        ),
        ("bug", "the model worker's log has the reason (KeyError)", False),
        ("101", "it takes 101 bytes, and adapters may take 100: raise lora_memory", False),
    ],
)
def test_an_adapter_that_cannot_be_used_is_not_kept(
    loads: AdapterLoads, shelf: Shelf, path: str, reason: str, missing: bool
) -> None:
    loads.obey(LoadAdapter(9, 2, 3, path))
    (answer,) = answers(loads, 1)
    assert isinstance(answer, AdapterFailed)
    assert (answer.handle, answer.reason, answer.missing) == (3, reason, missing)
    assert shelf.held == {}
    loads.obey(LoadAdapter(9, 2, 3, "5"))
    assert isinstance(answers(loads, 1)[0], AdapterLoaded)


def test_another_content_than_before_is_reported_with_its_digest(loads: AdapterLoads, shelf: Shelf) -> None:
    loads.obey(LoadAdapter(9, 2, 3, "5", digest="digest 6"))
    (answer,) = answers(loads, 1)
    assert isinstance(answer, AdapterFailed)
    assert (answer.digest, shelf.held) == ("digest 5", {})
    assert "another content" in answer.reason


def test_an_adapter_that_is_dropped_while_it_is_read_is_freed(loads: AdapterLoads, shelf: Shelf) -> None:
    shelf.gate.clear()
    loads.obey(LoadAdapter(9, 2, 1, "5"))
    assert shelf.began.wait(60)
    loads.obey(LoadAdapter(9, 2, 2, "6"))
    loads.obey(DropAdapter(9, 2, 1))
    loads.obey(DropAdapter(9, 2, 2))
    loads.obey(LoadAdapter(9, 2, 3, "7"))
    shelf.gate.set()
    assert [answer.handle for answer in answers(loads, 1)] == [3]
    assert shelf.held == {3: "7"}


def test_a_handle_that_is_given_again_while_it_is_read_has_the_later_content(loads: AdapterLoads, shelf: Shelf) -> None:
    shelf.gate.clear()
    loads.obey(LoadAdapter(9, 2, 1, "5"))
    assert shelf.began.wait(60)
    loads.obey(LoadAdapter(10, 2, 1, "6"))
    shelf.gate.set()
    assert answers(loads, 1) == [AdapterLoaded(10, 2, 1, 1, "digest 6", 4, 6)]
    assert shelf.held == {1: "6"}


def test_a_handle_that_is_given_again_and_cannot_be_read_then_has_no_content(loads: AdapterLoads, shelf: Shelf) -> None:
    shelf.gate.clear()
    loads.obey(LoadAdapter(9, 2, 1, "5"))
    assert shelf.began.wait(60)
    loads.obey(LoadAdapter(10, 2, 1, "missing"))
    shelf.gate.set()
    (answer,) = answers(loads, 1)
    assert isinstance(answer, AdapterFailed)
    assert shelf.held == {}


def test_an_adapter_that_is_dropped_while_it_is_read_in_vain_leaves_nothing(loads: AdapterLoads, shelf: Shelf) -> None:
    shelf.gate.clear()
    loads.obey(LoadAdapter(9, 2, 1, "half"))
    assert shelf.began.wait(60)
    loads.obey(DropAdapter(9, 2, 1))
    loads.obey(LoadAdapter(9, 2, 2, "5"))
    shelf.gate.set()
    assert [answer.handle for answer in answers(loads, 1)] == [2]
    assert shelf.held == {2: "5"}


def test_another_scheduler_begins_without_adapters(loads: AdapterLoads, shelf: Shelf) -> None:
    for handle, path in enumerate(["5", "7"], 1):
        loads.obey(LoadAdapter(9, 2, handle, path))
    answers(loads, 2)
    loads.obey(LoadAdapter(10, 2, 5, "8"))
    assert [answer.handle for answer in answers(loads, 1)] == [5]
    assert shelf.held == {5: "8"}


def test_an_adapter_that_comes_while_the_weights_are_away_is_read_when_they_are_back(
    loads: AdapterLoads, shelf: Shelf
) -> None:
    loads.obey(LoadAdapter(9, 2, 1, "5"))
    answers(loads, 1)
    loads.hold()
    shelf.began.clear()
    loads.obey(LoadAdapter(9, 2, 2, "6"))
    loads.obey(LoadAdapter(9, 2, 3, "7"))
    loads.obey(DropAdapter(9, 2, 3))
    assert not shelf.began.wait(0.2)
    again = Shelf()
    loads.move_to(again)
    assert sorted(answer.handle for answer in answers(loads, 2)) == [1, 2]
    assert again.held == {1: "5", 2: "6"}
    assert not shelf.began.is_set()


def test_another_registration_begins_without_adapters(loads: AdapterLoads, shelf: Shelf) -> None:
    """The scheduler is the same, and does not say what it has dropped meanwhile."""
    for handle, path in enumerate(["5", "7"], 1):
        loads.obey(LoadAdapter(9, 2, handle, path))
    answers(loads, 2)
    shelf.gate.clear()
    shelf.began.clear()
    loads.obey(LoadAdapter(9, 2, 3, "6"))
    assert shelf.began.wait(60)
    loads.forget()
    assert shelf.held == {}
    shelf.gate.set()
    loads.obey(LoadAdapter(9, 2, 1, "8"))
    assert [answer.handle for answer in answers(loads, 1)] == [1]
    assert shelf.held == {1: "8"}, "what was being read is freed, too"
