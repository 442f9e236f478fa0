"""The engine applies a step's changes to the rows, and the first executor that accepts the step launches it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from interfaces import GrammarState, ImageMetadata, Join, RowGrammar, SamplingParams, Step, StepResult
from model_worker import engine as engine_module
from model_worker.engine import Engine
from model_worker.execution.base import RunningRows, WorkerIdentity
from model_worker.execution.flight import Pending
from model_worker.grammar.masks import Masks
from model_worker.rows import PackedStep, StepError, WorkerRows
from model_worker.sampling.sampler import SamplerRows
from tests.model_worker.execution.tiny_worker import NONE, join

VOCAB = 50


class Taking:
    """An executor that accepts what it is made for, computes nothing, and writes down what it launched."""

    def __init__(self, running: RunningRows, accepting: bool = True) -> None:
        self.running = running
        self.accepting = accepting
        self.asked: list[int] = []
        self.launched: list[PackedStep] = []

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        self.asked.append(step.step)
        return self.accepting

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        self.launched.append(packed)
        self.running.rows.commit(packed, np.full(len(packed.sampling), 7, np.int32))
        return Pending.finished(StepResult(1, 0, 0, step.step, packed.rows, NONE, None, {}, 0))


def running_rows(**fields: Any) -> RunningRows:
    rows = WorkerRows(max_rows=4, max_model_len=32, block_size=8, num_blocks=16)
    sampler = SamplerRows(4, VOCAB, torch.device("cpu"))
    usual: dict[str, Any] = {"identity": WorkerIdentity(0, 0), "gives_hidden_states": False}
    return RunningRows(rows, sampler, None, **usual | fields)


def step_of(number: int, rows: list[int], joins: list[Join] | None = None, **fields: Any) -> Step:
    ntok = None if not joins else np.array([len(each.tokens) for each in joins], np.int32)
    usual: dict[str, Any] = {"incarnation": 1, "drop": NONE, "new_blocks": NONE.reshape(0, 3)}
    given = {name: np.array(value, np.int32) if name == "drop" else value for name, value in fields.items()}
    return Step(epoch=0, step=number, rows=np.array(rows, np.int32), ntok=ntok, joins=joins or [], **usual | given)


@pytest.fixture
def running() -> RunningRows:
    return running_rows()


@pytest.fixture
def taking(running: RunningRows) -> Taking:
    return Taking(running)


@pytest.fixture
def engine(running: RunningRows, taking: Taking) -> Engine:
    return Engine(running, [taking])


def test_the_first_executor_that_accepts_a_step_launches_it(running: RunningRows) -> None:
    executors = [Taking(running, accepting) for accepting in (False, True, True)]
    engine = Engine(running, executors)
    assert engine.step(step_of(3, [0], [join(0, [1, 2])])).step == 3
    assert [each.asked for each in executors] == [[3], [3], []]
    assert [len(each.launched) for each in executors] == [0, 1, 0]
    executors[0].accepting = True
    engine.step(step_of(4, [0]))
    assert [len(each.launched) for each in executors] == [1, 1, 0]


def test_a_list_without_a_last_resort_is_a_defect_that_is_named(running: RunningRows) -> None:
    engine = Engine(running, [Taking(running, accepting=False)])
    with pytest.raises(RuntimeError, match="step 3"):
        engine.begin(step_of(3, [0], [join(0, [1, 2])]))


def test_an_executor_gets_the_rows_as_the_step_has_changed_them(engine: Engine, taking: Taking) -> None:
    engine.step(step_of(1, [0, 1], [join(0, [1, 2]), join(1, [3, 4, 5])]))
    engine.step(step_of(2, [1], drop=[0]))
    first, second = taking.launched
    assert first.tokens.tolist() == [1, 2, 3, 4, 5]
    assert second.tokens.tolist() == [7]
    assert second.positions.tolist() == [4]


def test_a_step_that_does_not_fit_is_not_launched(engine: Engine, taking: Taking) -> None:
    engine.step(step_of(1, [0], [join(0, [1, 2])]))
    with pytest.raises(StepError, match="step 2"):
        engine.begin(step_of(2, [0], ahead=np.array([1000], np.int32)))
    assert len(taking.launched) == 1


def test_another_scheduler_finds_all_rows_free(engine: Engine, running: RunningRows) -> None:
    engine.step(
        step_of(1, [0, 1], [join(0, [1, 2], isolated=True), join(1, [1], SamplingParams(allowed_token_ids=[99]))])
    )
    assert running.isolated == {0}
    assert list(running.refused) == [1]
    engine.step(step_of(1, [0], [join(0, [5, 6])], incarnation=2))
    assert not running.isolated
    assert not running.refused
    assert running.rows.known.tolist() == [3, 0, 0, 0]
    # The same one gives a row away only after it has dropped it.
    engine.step(step_of(2, [0], [join(0, [5, 6])], incarnation=2))
    assert "drop it first" in running.refused[0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"params": SamplingParams(allowed_token_ids=[99])}, "allowed_token_ids"),
        ({"hidden_from": 0}, "hidden states are not supported"),
        ({"images": [cast(ImageMetadata, object())]}, "takes no images"),
        ({"grammar": RowGrammar("", GrammarState(), [])}, "made without masks"),
    ],
)
def test_a_sequence_that_cannot_be_served_is_refused_until_it_is_dropped(
    engine: Engine, running: RunningRows, taking: Taking, fields: dict[str, Any], reason: str
) -> None:
    engine.step(step_of(1, [2], [join(2, [1, 2], **fields)]))
    assert reason in running.refused[2]
    assert taking.launched[0].rows.tolist() == [2]
    engine.step(step_of(2, [2], [join(2, [3])], drop=[2]))
    assert not running.refused


def test_hidden_states_are_served_where_the_backend_gives_them() -> None:
    running = running_rows(gives_hidden_states=True)
    Engine(running, [Taking(running)]).step(step_of(1, [0], [join(0, [1, 2], hidden_from=0)]))
    assert not running.refused


def test_isolated_rows_are_known_from_their_join_to_their_end(engine: Engine, running: RunningRows) -> None:
    engine.step(step_of(1, [0, 1], [join(0, [1]), join(1, [2], isolated=True)]))
    assert running.isolated == {1}
    engine.step(step_of(2, [0], drop=[1]))
    assert not running.isolated


class Grammars:
    """Masks that write down which rows they were given."""

    def __init__(self) -> None:
        self.joined: dict[int, bool] = {}
        self.calls: list[str] = []

    def join(self, row: int, grammar: RowGrammar, emitted: np.ndarray, jumps: bool) -> None:
        self.joined[row] = jumps

    def drop(self, row: int) -> None:
        self.joined.pop(row, None)

    def flush(self) -> None:
        self.calls.append("flush")

    def start(self) -> None:
        self.calls.append("start")


def test_grammars_jump_where_no_token_must_be_reported() -> None:
    running = running_rows(gives_hidden_states=True)
    masks = Grammars()
    running.masks = cast(Masks, masks)
    engine = Engine(running, [Taking(running)])
    grammar = RowGrammar("", GrammarState(), [])
    reporting = SamplingParams(temperature=0.0, top_logprobs=2)
    joins = [
        join(0, [1], grammar=grammar),
        join(1, [1], reporting, grammar=grammar),
        join(2, [1], hidden_from=0, grammar=grammar),
        join(3, [1]),
    ]
    engine.step(step_of(1, [0, 1, 2, 3], joins))
    assert masks.joined == {0: True, 1: False, 2: False}
    engine.step(step_of(2, [1, 2, 3], drop=[0]))
    assert masks.joined == {1: False, 2: False}
    engine.rest()
    assert masks.calls == ["flush", "flush", "start"]


def test_the_engine_does_not_know_what_computes() -> None:
    source = Path(engine_module.__file__).read_text()
    assert not re.search(r"device|cuda|cpu|gpu|torch", source, re.IGNORECASE)
    assert source.count("\n") < 250
