"""What processors of vLLM's form hear of requests that come and go, and what becomes of requests when one fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from interfaces import SamplingParams
from model_worker.sampling.processors import ProcessedRow, ProcessedRows
from model_worker.sampling.registry import Processor, ProcessorForm
from model_worker.sampling.slots import SlotParams, Slots, Slotted


class Banning:
    """Bans a token for each request, and keeps them as vLLM's own processors do: the added first, then the removed."""

    def __init__(self) -> None:
        self.bans: dict[int, int] = {}

    def update_state(self, update: Any) -> None:
        for slot, params, _, _ in update.added if update else ():
            self.bans[slot] = params.extra_args["token"]
        for slot in update.removed if update else ():
            self.bans.pop(slot, None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for slot, token in self.bans.items():
            logits[slot, token] = -torch.inf
        return logits


def request(**parameters: Any) -> Slotted:
    return Slotted(SlotParams.of(SamplingParams(), parameters), [1], [])


def banned(logits: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(row.isinf()).flatten().tolist() for row in logits]


def test_a_request_that_takes_the_slot_of_another_is_heard() -> None:
    slots = Slots(Banning())
    first, second, third = (request(token=token) for token in (3, 4, 5))
    assert banned(slots.apply(torch.zeros(2, 9), [0, 1], {0: first, 1: second})) == [[3], [4]]
    # One leaves and another comes between two calls, in the same row and in another.
    assert banned(slots.apply(torch.zeros(2, 9), [0, 1], {0: third, 1: second})) == [[5], [4]]
    assert banned(slots.apply(torch.zeros(2, 9), [1, 2], {1: second, 2: first})) == [[4], [3]]
    assert banned(slots.apply(torch.zeros(1, 9), [2], {2: first})) == [[3]]
    assert len(slots.processor.bans) == 1


def test_none_goes_on_without_a_processor_that_failed() -> None:
    """Also a request whose prompt is not yet computed: it may be one that the processor has not heard of."""
    processor: Any = Banning()
    rows = ProcessedRows(4, {"ban": Processor(ProcessorForm.SLOTS, processor, {}, False)})

    def change(*numbers: int) -> list[bool]:
        logits = torch.zeros(len(numbers), 9)
        index = np.arange(len(numbers), dtype=np.intp)
        rows.change(logits, index, list(numbers), np.zeros(len(numbers), np.int64))
        return logits.isnan().any(dim=1).tolist()

    for row, wish in enumerate([request(), request(token=3)]):
        rows.hold(row, ProcessedRow({}, {}, None, None, {"ban": wish}))
    assert change(0) == [True]
    rows.drop(0)
    rows.hold(2, ProcessedRow({}, {}, None, None, {"ban": request(token=4)}))
    assert change(1, 2) == [True, False]
    assert rows.failure(1) == "the logits processor 'ban' failed: KeyError"
    assert rows.failure(2) is None
