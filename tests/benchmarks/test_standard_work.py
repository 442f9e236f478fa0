"""The standard work is what its definition says, and servers are started for all of it."""

from __future__ import annotations

import pytest

from benchmarks.standard_work import STANDARD_WORK, Needs, chosen_work
from benchmarks.workload import plan


@pytest.mark.parametrize(
    ("name", "concurrency", "prompt", "output"),
    [("W1", 1, 128, 128), ("W2", 16, 128, 128), ("W3", 32, 512, 64), ("W4", 8, 1056, 32), ("W5", 64, 32, 64)],
)
def test_shapes(name: str, concurrency: int, prompt: int, output: int) -> None:
    work = STANDARD_WORK[name]
    requests = plan(work.workload(7, prefix_seed=7))
    assert {(len(request.prompt), request.output_tokens) for request in requests} == {(prompt, output)}
    assert (work.load(5.0).concurrency, work.load(5.0).time_limit) == (concurrency, 5.0)
    assert len(requests) >= concurrency


def test_the_intruder_fits_beside_the_streams() -> None:
    work = STANDARD_WORK["W6"]
    needs = Needs.of([work, STANDARD_WORK["W1"]], threads=2)
    assert work.intruder is not None
    assert (work.concurrency, work.intruder.prompt_tokens, work.intruder.every_s) == (8, 4096, 3.0)
    assert needs.sequences == 9
    assert needs.context > 4096 + 1
    assert needs.context > work.prompt_tokens + work.output_tokens


def test_a_choice_keeps_the_order_and_names_what_it_does_not_know() -> None:
    assert [work.name for work in chosen_work("w3, W1")] == ["W1", "W3"]
    assert [work.name for work in chosen_work("")] == list(STANDARD_WORK)
    assert {work.model for work in chosen_work("", short=True)} == {"tiny"}
    with pytest.raises(ValueError, match="got W9"):
        chosen_work("W1,W9")
