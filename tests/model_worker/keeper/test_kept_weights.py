"""A keeper in a thread, and workers' ends: what is kept comes back to its bits, in the same memory, or not at all."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from model_worker.keeper import kept_weights, protocol
from model_worker.keeper.kept_weights import Found, KeptWeights, ModelFacts
from model_worker.keeper.pieces import UNIT
from model_worker.keeper.protocol import Fetch, Make, Open, Seal, conversation
from tests.model_worker.keeper.host_pieces import HostPieces
from tests.model_worker.keeper.running import Running, running

FACTS = ModelFacts("float32", "{}", ["a.b"], [], {})


def some_tensors() -> dict[str, Tensor]:
    """Joined weights, a tied one, a buffer, an empty one, and types of one, two and eight bytes."""
    whole = torch.randn(5, 7)
    joined = [nn.Parameter(part, requires_grad=False) for part in whole.split([2, 3])]
    tied = nn.Parameter(torch.randn(300, 30).bfloat16(), requires_grad=False)
    codes = nn.Parameter(torch.randn(16, 16).to(torch.float8_e4m3fn), requires_grad=False)
    return {
        "a.q.weight": joined[0],
        "a.k.weight": joined[1],
        "embed.weight": tied,
        "head.weight": tied,
        "codes": codes,
        "steps": torch.arange(3),
        "none": nn.Parameter(torch.empty(0, 4), requires_grad=False),
    }


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return found


def place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def found_by(worker: KeptWeights, identity: str) -> Found:
    found = worker.find(identity)
    assert found is not None
    return found


@pytest.mark.parametrize("full", [1, 20_000, 1 << 28])
def test_what_was_kept_comes_back_in_the_same_memory(
    keeper: Running, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    """Whatever the size of a piece."""
    monkeypatch.setattr(kept_weights, "_PIECE_BYTES", full)
    tensors = some_tensors()
    want = {name: bits(tensor) for name, tensor in tensors.items()}
    before = [StorageWeakRef(tensors[name].untyped_storage()) for name in ("a.q.weight", "embed.weight", "codes")]
    first = keeper.worker()
    first.keep("one", FACTS, tensors)
    assert all(storage.expired() for storage in before), "nothing is there twice"
    assert {name: bits(tensor) for name, tensor in tensors.items()} == want
    second = keeper.worker()
    found = found_by(second, "one")
    assert found.facts == FACTS
    assert {name: bits(tensor) for name, tensor in found.tensors.items()} == want
    assert [(t.dtype, t.shape, t.stride()) for t in found.tensors.values()] == [
        (t.dtype, t.shape, t.stride()) for t in tensors.values()
    ]
    assert place(found.tensors["embed.weight"]) == place(found.tensors["head.weight"])
    joined, start = place(found.tensors["a.q.weight"])
    assert place(found.tensors["a.k.weight"]) == (joined, start + 14)
    assert first.size == second.size == sum(keeper.memory._sizes.values())
    # Another process' memory is the same: what one writes there (none does), the other sees.
    with torch.no_grad():
        tensors["a.k.weight"][0, 0] = 5.0
    assert found.tensors["a.k.weight"][0, 0] == 5.0


def test_other_weights_are_freed_first(keeper: Running, caplog: pytest.LogCaptureFixture) -> None:
    keeper.worker().keep("one", FACTS, some_tensors())
    assert keeper.memory.handles
    with caplog.at_level(logging.INFO):
        assert keeper.worker().find("two") is None
    assert caplog.messages == ["the weights are read from files, since the weights that were kept are others"]
    assert keeper.memory.handles == []
    assert keeper.worker().find("one") is None


def test_what_a_worker_did_not_finish_is_freed(keeper: Running) -> None:
    with conversation(keeper.path) as line:
        line.ask(Open("one"))
        line.descriptor(Make(UNIT))
    with conversation(keeper.path) as line:
        answer, descriptor = line.ask(Open("one"))
    assert descriptor is None
    assert answer.reason == "none are kept yet"
    assert keeper.memory.handles == []


def test_weights_that_have_changed_are_not_used(keeper: Running, caplog: pytest.LogCaptureFixture) -> None:
    tensors = some_tensors()
    keeper.worker().keep("one", FACTS, tensors)
    with torch.no_grad():
        tensors["embed.weight"][7, 7] += 1
    del tensors
    worker = keeper.worker()
    assert worker.find("one") is None
    assert caplog.messages == ["the weights are read from files, since what was kept has changed since"]
    assert worker.size == 0
    assert keeper.memory.handles == []


def test_what_cannot_be_mapped_is_freed(keeper: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for the weights once: those that are read from files take the place of those that were kept."""
    monkeypatch.setattr(kept_weights, "_PIECE_BYTES", 1)
    keeper.worker().keep("one", FACTS, some_tensors())
    count = len(keeper.memory.handles)
    keeper.memory.left = 0
    keeper.memory.refused = keeper.memory.handles[2]
    worker = keeper.worker()
    assert worker.find("one") is None
    assert keeper.memory.left == count * UNIT
    keeper.memory.refused = None
    worker.keep("one", FACTS, some_tensors())
    assert worker.size == count * UNIT


def test_a_keeper_that_does_not_answer_is_asked_again(
    keeper: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = keeper.worker()
    worker.keep("one", FACTS, some_tensors())
    with conversation(keeper.path) as line:
        os.close(line.descriptor(Open("one")))
        # It talks to one at a time.
        monkeypatch.setattr(protocol, "_PATIENCE", 0.05)
        worker.drop()
    assert caplog.messages[0] == "the keeper of the weights may still have them: timed out"
    assert worker.size
    monkeypatch.undo()
    worker.drop()
    assert worker.size == 0
    assert keeper.memory.handles == []


def test_without_a_keeper_nothing_is_found_and_nothing_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = KeptWeights(tmp_path / "keep0.sock", HostPieces)
    tensors = some_tensors()
    places = [place(tensor) for tensor in tensors.values()]
    assert worker.find("one") is None
    worker.keep("one", FACTS, tensors)
    assert [message.partition(", since ")[2] for message in caplog.messages] == 2 * [
        "no keeper of the weights is there"
    ]
    assert [place(tensor) for tensor in tensors.values()] == places
    assert worker.size == 0


def test_memory_that_cannot_be_shared_is_one_line_of_the_log(keeper: Running, caplog: pytest.LogCaptureFixture) -> None:
    keeper.able = False
    worker = keeper.worker()
    with caplog.at_level(logging.INFO):
        assert worker.find("one") is None
        worker.keep("one", FACTS, some_tensors())
    assert caplog.messages == ["the weights are read from files, since there is no GPU"]


def test_weights_that_do_not_fit_beside_themselves_stay(
    keeper: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was moved before stays moved, and is counted; no other worker finds it."""
    monkeypatch.setattr(kept_weights, "_PIECE_BYTES", 1)
    keeper.memory.left = 2 * UNIT
    tensors = some_tensors()
    want = {name: bits(tensor) for name, tensor in tensors.items()}
    worker = keeper.worker()
    worker.keep("one", FACTS, tensors)
    assert caplog.messages == ["the weights are not kept for the next worker, since 0 bytes are free"]
    assert {name: bits(tensor) for name, tensor in tensors.items()} == want
    assert worker.size == 2 * UNIT
    assert keeper.worker().find("one") is None
    assert keeper.memory.handles == []


def test_a_copy_that_is_not_what_was_copied_is_not_used(
    keeper: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = some_tensors()
    want = {name: bits(tensor) for name, tensor in tensors.items()}
    copy = Tensor.copy_

    def wrong(target: Tensor, source: Tensor) -> Tensor:
        copy(target, source)[-1:] += 1
        return target

    monkeypatch.setattr(Tensor, "copy_", wrong)
    worker = keeper.worker()
    worker.keep("one", FACTS, tensors)
    said = "the weights are not kept for the next worker, since a copy of the weights is not what they are"
    assert caplog.messages == [said]
    assert {name: bits(tensor) for name, tensor in tensors.items()} == want
    assert worker.size == 0


def test_a_keeper_that_starts_with_its_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "START_SECONDS", 60.0)
    with running() as other:
        late = other.path.with_name("late.sock")
        worker = KeptWeights(late, HostPieces)
        asked = Thread(target=worker.find, args=["one"])
        other.able = False
        asked.start()
        late.symlink_to(other.path)
        asked.join()
        assert not worker.able, "it was asked"


def test_dropped_weights_are_freed(keeper: Running) -> None:
    tensors = some_tensors()
    worker = keeper.worker()
    worker.keep("one", FACTS, tensors)
    worker.drop()
    assert worker.size == 0
    assert keeper.worker().find("one") is None
    assert keeper.memory.handles == []


def test_what_has_no_place_is_refused_and_what_is_no_message_ends_a_conversation(keeper: Running) -> None:
    with conversation(keeper.path) as line:
        for request in (Fetch(0), Make(0), Make(UNIT + 1), Make(-UNIT), Seal("one")):
            answer, descriptor = line.ask(request)
            assert answer.reason == f"{type(request).__name__} has no place now"
            assert descriptor is None
    keeper.worker().keep("one", FACTS, some_tensors())
    with conversation(keeper.path) as line:
        assert line.ask(Make(UNIT))[0].reason == "Make has no place now", "they are sealed"
        assert line.ask(Fetch(99))[0].reason == "Fetch has no place now"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(keeper.path))
        stranger.send(b"\x81\xa4type\xa4Burn")
        assert stranger.recv(100) == b""
    found_by(keeper.worker(), "one")
