"""A step for which a GPU has no memory is computed in parts, with the same tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from interfaces import LogprobMode, SamplingParams
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from tests.model_worker.execution.tiny_worker import TinyWorker, join
from tests.model_worker.tiny_models import tiny_model

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=3)
REPORTED = SamplingParams(temperature=0.0, logprobs=LogprobMode.TEMPERED)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tiny_model("llama", tmp_path_factory.mktemp("out_of_memory"), seed=1)
    return load_model(path, "float32", "cpu", lambda *_: None)


def with_room_for(worker: TinyWorker, tokens: int) -> list[int]:
    """Fails passes of more tokens. Returns the list of those that are run."""
    ran: list[int] = []

    def limited(method: Any) -> Any:
        def call(batch: Any, *arguments: Any) -> Any:
            if batch.num_tokens > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
            ran.append(batch.num_tokens)
            return method(batch, *arguments)

        return call

    worker.backend.logits = limited(worker.backend.logits)
    # It calls `logits` on a CPU without a stack only.
    worker.backend.greedy = limited(worker.backend.greedy)
    return ran


@pytest.mark.parametrize("overlap", ["cuda", "off"])
def test_a_step_in_parts_gives_the_tokens_of_the_step(loaded: LoadedModel, overlap: str) -> None:
    drawn = []
    for room in (1000, 3):
        worker = TinyWorker(loaded, overlap)
        ran = with_room_for(worker, room)
        joins = [join(0, PROMPT), join(1, PROMPT[:4], SAMPLED), join(2, PROMPT[:3], REPORTED), join(3, PROMPT[:1])]
        first = worker.begin([0, 1, 2, 3], [6, 4, 3, 1], joins).result()
        second = worker.begin([3, 1, 0, 2])
        third = worker.begin([0, 1, 3])
        results = [first, second.result(), third.result()]
        assert all(not result.errors for result in results)
        assert [result.rows.tolist() for result in results] == [[0, 1, 2, 3], [3, 1, 0, 2], [0, 1, 3]]
        drawn.append([result.tokens.tolist() for result in results])
        assert max(ran) <= room
    assert drawn[0] == drawn[1]


def test_a_row_that_fails_alone_fails_with_a_sentence_and_the_others_go_on(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    worker = TinyWorker(loaded, "cuda")
    worker.prefill(join(0, PROMPT), join(1, PROMPT))
    forward = worker.backend.logits

    def logits(batch: Any) -> torch.Tensor:
        if (batch.block_tables[:, 0] == worker.shared.rows.block_tables[1, 0]).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
        result: torch.Tensor = forward(batch)
        return result

    worker.backend.logits = logits
    worker.backend.greedy = lambda batch, wanted: (logits(batch).argmax(-1).numpy(), logits(batch)[wanted])
    result = worker.begin([0, 1]).result()
    assert result.rows.tolist() == [0]
    assert list(result.errors) == [1]
    assert "no memory for this request alone" in result.errors[1]
    assert "Tried to allocate 20 MiB." in result.errors[1]
    after = worker.begin([0], drop=[1]).result()
    assert (after.rows.tolist(), after.errors) == ([0], {})
    assert "it runs in parts" in caplog.text


def test_a_row_that_fails_in_a_piece_of_its_prompt_computes_no_more_of_it(loaded: LoadedModel) -> None:
    """Steps in flight go on from where it would be."""
    worker = TinyWorker(loaded, "cuda")
    ran: list[list[int]] = []
    forward = worker.backend.logits

    def logits(batch: Any) -> torch.Tensor:
        tokens = batch.tokens.tolist()
        if len(tokens) > 2 or PROMPT[1] in tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
        ran.append(tokens)
        result: torch.Tensor = forward(batch)
        return result

    worker.backend.logits = logits
    worker.backend.greedy = lambda batch, wanted: (logits(batch).argmax(-1).numpy(), logits(batch)[wanted])
    result = worker.begin([0], [6], [join(0, PROMPT)]).result()
    assert (result.rows.tolist(), list(result.errors)) == ([], [0])
    assert ran == [PROMPT[:1]]
    assert worker.begin([0]).result().rows.tolist() == [0]
    fresh = worker.begin([0], [1], [join(0, PROMPT[:1])], drop=[0]).result()
    assert (fresh.rows.tolist(), fresh.errors) == ([0], {})


def test_a_step_with_an_isolated_row_is_not_repeated(loaded: LoadedModel) -> None:
    worker = TinyWorker(loaded, "cuda")
    worker.prefill(join(0, PROMPT[:2], isolated=True), join(1, PROMPT), join(2, PROMPT))
    ran = with_room_for(worker, 1)
    with pytest.raises(torch.OutOfMemoryError):
        worker.begin([0, 1, 2])
    # Row 0 alone; then the others, which fail.
    assert set(ran) == {1}


def reported_beside(loaded: LoadedModel, params: SamplingParams, failures: int) -> list[list[int]]:
    """Draws two tokens of a row with `params`; the first time beside a report of a prompt that fails so often."""
    worker = TinyWorker(loaded, "cuda")
    report = worker.shared.sampler.report_prompt
    left = [None] * failures

    def fails(*arguments: Any) -> None:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
        report(*arguments)

    sampler: Any = worker.shared.sampler
    sampler.report_prompt = fails
    joins = [join(0, PROMPT, params), join(1, PROMPT, report_from=1)]
    results = [worker.begin([0, 1], [6, 6], joins).result(), worker.begin([0, 1]).result()]
    assert not left
    assert all(not result.errors for result in results)
    return [result.tokens.tolist() for result in results]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failure_after_the_draw_is_repeated_where_no_row_remembers_it(loaded: LoadedModel, failures: int) -> None:
    assert reported_beside(loaded, SAMPLED, failures) == reported_beside(loaded, SAMPLED, 0)


def test_a_failure_after_the_draw_is_final_where_a_row_counts_its_tokens(loaded: LoadedModel) -> None:
    counted = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    assert reported_beside(loaded, counted, 0)
    with pytest.raises(torch.OutOfMemoryError):
        reported_beside(loaded, counted, 1)
