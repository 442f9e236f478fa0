"""A pass for which a GPU has no memory half way loses the states of its rows: they begin anew, with the same tokens."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from interfaces import Finish, SamplingParams, SchedulingOptions, TextContext, TextGenerationInputs
from model_worker.capacity import Capacity
from model_worker.execution.pass_room import PassRoom
from model_worker.model import LoadedModel
from model_worker.pipelines.text import TextPipeline
from model_worker.recurrent import mixers
from model_worker.runner import ModelRunner
from tests.model_worker.execution.tiny_worker import TinyWorker, join
from tests.model_worker.pipelines.test_text import context
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.model_worker.tiny_models import VOCAB
from tests.system.in_process import Answer, InProcessServer, Shape, load

WHY = "CUDA out of memory. Tried to allocate 20 MiB."


@pytest.fixture(scope="module", params=["lfm2", "falcon_h1"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_hybrid(request.param, tmp_path_factory.getbasetemp()))


def without_memory(loaded: LoadedModel, patch: pytest.MonkeyPatch, fails: Callable[[str, int], bool]) -> list[int]:
    """Fails passes, by their kind and tokens, in their last recurrent layer: the others have written their states.

    A kind is "prefill", "decode" or "mixed". Returns the numbers of tokens of the passes that failed.
    """
    assert loaded.recurrent is not None
    last: Any = loaded.recurrent.mixers[-1]
    forward = last.forward
    failed: list[int] = []

    def limited(hidden_states: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
        current = mixers._current.get()
        assert current is not None
        single = {group.length == 1 for group in current.groups}
        kind = "mixed" if len(single) > 1 else "decode" if single == {True} else "prefill"
        if fails(kind, hidden_states.shape[1]):
            failed.append(hidden_states.shape[1])
            raise torch.OutOfMemoryError(WHY)
        result: torch.Tensor = forward(hidden_states, *positional, **named)
        return result

    patch.setattr(last, "forward", limited)
    return failed


def drawn(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def request(number: int) -> TextContext:
    """Greedy and drawn ones, and some whose tokens are counted or reported."""
    params = SamplingParams(
        temperature=number % 2,
        seed=number,
        max_new_tokens=random.randint(3, 14),
        frequency_penalty=0.7 * (number % 3 == 0),
        top_logprobs=int(number % 4 == 0),
    )
    # The first prompt is longer than a step.
    return TextContext.from_prompt(drawn(random.randint(1, 30) if number else 40), params)


def answers(
    loaded: LoadedModel, asked: list[TextContext], shape: Shape, alone: int = 0
) -> tuple[list[Answer], InProcessServer]:
    """Serve requests, of which every `alone`th shares no pass."""
    server = InProcessServer(loaded, shape)
    for number, each in enumerate(asked):
        options = SchedulingOptions(deterministic=bool(alone) and number % alone == 0)
        server.submit_context(copy.deepcopy(each), options)
    return server.run(), server


@pytest.mark.parametrize(
    ("kind", "overlap"), [("prefill", "cuda"), ("mixed", "cuda"), ("decode", "cuda"), ("decode", "off")]
)
def test_tokens_are_those_of_undisturbed_steps(
    loaded: LoadedModel, kind: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes in a row fail; with "cuda" while a step is in flight."""
    asked = [request(number) for number in range(8)]
    shape = Shape(num_blocks=400, max_rows=5, device_overlap=overlap)
    want, _ = answers(loaded, asked, shape)
    of_kind = itertools.count()
    behind: list[str] = []

    def fails(each: str, tokens: int) -> bool:
        """The second pass of its kind, and the next one."""
        if not behind and each == kind and next(of_kind) == 1:
            behind.append(each)
            return True
        if len(behind) == 1 and tokens > 1:
            behind.append(each)
            return True
        return False

    failed = without_memory(loaded, monkeypatch, fails)
    got, server = answers(loaded, asked, shape)
    assert len(failed) == 2
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want], asked
    assert {answer.finished for answer in got} == {Finish.LENGTH}
    assert [answer.reports.keys() for answer in got] == [answer.reports.keys() for answer in want]
    assert server.scheduler.counters["preemptions"] > 1


@pytest.mark.parametrize("failing", [0, 4, 9])
def test_rows_that_share_no_pass_begin_anew(loaded: LoadedModel, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(number) for number in range(6)]
    want, _ = answers(loaded, asked, Shape(num_blocks=400), alone=2)
    passes = itertools.count()
    failed = without_memory(loaded, monkeypatch, lambda *_: next(passes) == failing)
    got, _ = answers(loaded, asked, Shape(num_blocks=400), alone=2)
    assert len(failed) == 1
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want], asked
    assert {answer.finished for answer in got} == {Finish.LENGTH}


def test_a_device_without_memory_for_long_passes_serves_in_short_ones(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request(number) for number in range(6)]
    shape = Shape(num_blocks=400, device_overlap="cuda")
    want, _ = answers(loaded, asked, shape)
    failed = without_memory(loaded, monkeypatch, lambda _, tokens: tokens > 3)
    got, _ = answers(loaded, asked, shape)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want], asked
    assert max(failed) > 20
    assert len(failed) < 10, "it is learnt"


def test_rows_that_are_lost_are_left_out_until_they_are_dropped(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [drawn(6), drawn(4), drawn(5)]
    worker = TinyWorker(loaded, "cuda")
    worker.prefill(*(join(row, text) for row, text in enumerate(texts[:2])))
    with monkeypatch.context() as patch:
        without_memory(loaded, patch, lambda _, tokens: tokens > 1)
        lost = worker.begin([0, 1])
        beside = worker.begin([0, 1, 2], [1, 1, 5], [join(2, texts[2])])
    result = lost.result()
    assert (result.rows.tolist(), result.errors) == ([], {})
    assert result.again is not None
    assert result.again.tolist() == [0, 1]
    # A step that was sent before that was known.
    assert "no memory for a pass of 2 tokens: its 2 rows begin anew, in passes of at most 1;" in caplog.text
    assert beside.result().rows.tolist() == [2]
    assert beside.result().again is None
    again = worker.begin([2, 0], [1, 6], [join(0, texts[0])], drop=[0, 1]).result()
    fresh = TinyWorker(loaded)
    want = [*beside.result().tokens, *again.tokens.tolist()]
    got = [fresh.begin([2], [5], [join(2, texts[2])]), fresh.begin([2, 0], [1, 6], [join(0, texts[0])])]
    assert [token for each in got for token in each.result().tokens.tolist()] == want
    assert again.again is None


def test_a_row_that_fails_alone_has_an_error_and_may_begin_anew(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has failed before it. One that shares no pass is not cut."""
    worker = TinyWorker(loaded, "cuda")
    worker.prefill(join(0, drawn(3)), join(1, drawn(1)))
    joins = [join(2, drawn(5), isolated=True), join(3, drawn(7))]
    with monkeypatch.context() as patch:
        without_memory(loaded, patch, lambda _, tokens: tokens > 1)
        assert worker.begin([0, 1]).result().errors == {}
        result = worker.begin([2, 3], [5, 7], joins, drop=[0, 1]).result()
    assert list(result.errors) == [2]
    assert f"no memory for this request alone; lower kv_memory or max_batch_tokens: {WHY}" in result.errors[2]
    assert result.again is not None
    assert (result.rows.tolist(), result.again.tolist()) == ([3], [2])
    assert worker.engine.counters.step_tokens == 8, "so many passes of one token"
    after = worker.begin([2, 3]).result()
    assert (after.rows.tolist(), after.errors, after.again) == ([3], {}, None)


@pytest.mark.parametrize(("failures", "error"), [(1, ""), (2, "no memory for this request alone")])
def test_a_request_ends_when_it_fails_alone_again(
    loaded: LoadedModel, failures: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server, and of a pipeline."""
    asked = context(drawn(1), SamplingParams(temperature=0, max_new_tokens=4))
    want, _ = answers(loaded, [asked], Shape())
    with monkeypatch.context() as patch:
        passes = itertools.count()
        failed = without_memory(loaded, patch, lambda *_: next(passes) < failures)
        got, _ = answers(loaded, [asked], Shape())
    assert failed == [1] * failures
    assert bool(got[0].error) == bool(error)
    assert error in got[0].error
    assert got[0].tokens == ([] if error else want[0].tokens)

    capacity = Capacity(num_blocks=8, block_size=4, max_rows=2, max_model_len=16)
    pipeline = TextPipeline(ModelRunner(loaded, 8, 4, max_rows=2), capacity)
    passes = itertools.count()
    without_memory(loaded, monkeypatch, lambda *_: next(passes) < failures)
    inputs = TextGenerationInputs(batches=[[asked]], num_steps=4)
    if error:
        with pytest.raises(ValueError, match=error):
            pipeline.execute(inputs)
        assert pipeline.free_blocks == pipeline.num_blocks
    else:
        pipeline.execute(inputs)
        assert asked.tokens.generated.tolist() == want[0].tokens
    pipeline.close()


def test_a_pipeline_computes_lost_requests_anew(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = Capacity(num_blocks=64, block_size=4, max_rows=4, max_model_len=72)
    prompts = drawn(3), drawn(19)
    seen: list[int] = []

    def answers() -> list[list[int]]:
        seen.clear()
        runner = ModelRunner(loaded, capacity.num_blocks, capacity.block_size, max_rows=capacity.max_rows)
        pipeline = TextPipeline(
            runner, capacity, max_batch_tokens=8, batch_processors=[lambda inputs: seen.append(len(inputs.logits))]
        )
        contexts = [context(prompt, SamplingParams(temperature=0, max_new_tokens=8)) for prompt in prompts]
        while not all(each.is_done for each in contexts):
            pipeline.execute(TextGenerationInputs(batches=[contexts], num_steps=3))
        pipeline.close()
        return [each.tokens.all.tolist() for each in contexts]

    want = answers()
    whole = list(seen)
    passes = itertools.count()
    failed = without_memory(loaded, monkeypatch, lambda _, tokens: next(passes) in (1, 6, 7) and tokens > 1)
    assert answers() == want, prompts
    assert failed[0] > 1
    # One for each token, of a part that has no other.
    assert sum(seen) == sum(whole)


def steps_until(room: PassRoom, most: int, passes_of: int = 0) -> int:
    """Counts steps, with passes of so many tokens, until passes may have `most` tokens."""
    for number in range(40_000):
        if room.holds(most):
            return number
        room.passed(passes_of)
        room.ended()
    return -1


def test_the_limit_of_passes_rises_again() -> None:
    room = PassRoom()
    assert room.holds(1 << 20)
    room.lower(64)
    room.lower(32)
    room.lower(16)
    assert (room.holds(8), room.holds(9), room.step_tokens) == (True, False, 64)
    room.lower(40)
    assert room.holds(8), "it could not be cut"
    assert steps_until(room, 16, 8) == 1000
    assert steps_until(room, 32, 9) == 1000


def test_a_rise_of_the_limit_waits_longer_where_the_last_one_has_failed() -> None:
    room = PassRoom()
    room.lower(16)
    waited = []
    for _ in range(6):
        waited.append(steps_until(room, 16))
        room.lower(16)
    assert waited == [1000, 2000, 4000, 8000, 16_000, 16_000]


def test_further_failures_of_a_step_make_no_rise_wait_and_one_that_held_none() -> None:
    room = PassRoom()
    room.lower(16)
    assert steps_until(room, 16) == 1000
    room.lower(16)
    room.lower(8)
    room.lower(4)
    assert steps_until(room, 4) == 2000
    assert steps_until(room, 8, 4) == 2000
    room.lower(8)
    assert steps_until(room, 8) == 2000, "a thousand, and one try failed"


def test_a_limit_that_nothing_has_needed_rises_no_further() -> None:
    room = PassRoom()
    room.lower(16)
    for _ in range(5000):
        room.passed(1)
        room.ended()
    assert room.most == 16
    room.passed(9)
    room.ended()
    assert room.most == 32
