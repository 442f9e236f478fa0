"""The rows of the process that fills masks, without the process."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from interfaces.context.grammar_state import GrammarState
from model_worker.grammar import mask_process
from model_worker.grammar.mask_process import HEADER_BYTES, Masks
from tests.api_server.constraints.vocabulary import EOS, compiled, loaded

ROWS = 4


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> tuple[Masks, NDArray[np.int32]]:
    """A clock that ends the process is nothing for a test."""
    monkeypatch.setattr(mask_process, "CPU_SECONDS", 0.0)
    vocabulary, _ = loaded()
    shared = np.zeros((ROWS, vocabulary.words + 3), np.int32)
    return Masks(vocabulary, np.zeros(HEADER_BYTES // 4, np.int32), shared), shared


def join(
    row: int, grammar: str, emitted: list[int], state: GrammarState | None = None, ends: Any = (EOS,)
) -> list[Any]:
    return [row, grammar, dataclasses.asdict(state or GrammarState()), list(ends), emitted]


def allowed(mask: NDArray[np.int32]) -> list[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return tokens


def test_a_replayed_row_goes_on_as_the_first(masks: tuple[Masks, NDArray[np.int32]]) -> None:
    rows, shared = masks
    grammar = compiled("json_schema", {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 3})
    assert rows.serve([], [join(0, grammar, [])], [])[0] == {}
    emitted: list[int] = []
    for _ in range(25):
        emitted.append(random.choice(allowed(shared[0])))
        if emitted[-1] == EOS:
            break
        assert rows.serve([], [], [[0, emitted[-1:]]])[0] == {}
        assert rows.serve([1], [join(1, grammar, emitted)], [])[0] == {}
        assert (shared[0] == shared[1]).all()


def test_what_is_forced_follows_at_once_one_by_one_and_in_a_replay(masks: tuple[Masks, NDArray[np.int32]]) -> None:
    rows, shared = masks
    texts = {"a": {"const": "a long text without a choice"}, "b": {"enum": [1, 2]}, "c": {"const": [None, True, "é"]}}
    schema = {"type": "object", "properties": texts, "required": list(texts), "additionalProperties": False}
    grammar = compiled("json_schema", schema)
    emitted: list[int] = []
    jumps = 0
    forced = rows.serve([], [join(0, grammar, []), join(1, grammar, [])], [])[1]
    for _ in range(200):
        assert (shared[0] == shared[1]).all()
        run = forced.get(0) or [random.choice(allowed(shared[0]))]
        for i, token in enumerate(run):
            assert allowed(shared[1]) == [token] or len(run) == 1
            rows.serve([], [], [[1, [token]]])
            assert rows.serve([2], [join(2, grammar, [*emitted, *run[: i + 1]])], [])[0] == {}
            assert (shared[1] == shared[2]).all()
        emitted += run
        jumps += len(run) > 1
        if run == [EOS]:
            break
        errors, forced = rows.serve([], [], [[0, run]])
        assert errors == {}
    assert jumps > 1
    assert emitted[-1] == EOS


def test_what_comes_before_is_free_but_may_not_be_the_end(masks: tuple[Masks, NDArray[np.int32]]) -> None:
    rows, shared = masks
    state = GrammarState()
    state.set_thinking_region(None, [7, 8])
    assert rows.serve([], [join(2, compiled("regex", "[0-9]"), [], state, ends=[EOS, 5])], [])[0] == {}
    vocabulary, _ = loaded()
    for token in (9, 7, 9, 7, 8):
        assert set(range(vocabulary.words * 32)) - set(allowed(shared[2])) == {EOS, 5}
        rows.serve([], [], [[2, [token]]])
    digits = allowed(shared[2])
    assert len(digits) == 10
    rows.serve([], [], [[2, digits[:1]]])
    assert allowed(shared[2]) == [EOS, 5]


def test_a_row_that_takes_too_long_fails_alone(
    masks: tuple[Masks, NDArray[np.int32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, shared = masks
    rows.serve([], [join(0, compiled("regex", "a*"), []), join(1, compiled("regex", "b*"), [])], [])
    token = next(token for token in allowed(shared[0]) if token != EOS)
    monkeypatch.setattr(mask_process, "SPARE_SECONDS", -1.0)
    errors, _ = rows.serve([], [], [[0, [token]]])
    assert list(errors) == [0]
    assert "20 ms of processor time for each token" in errors[0]
    monkeypatch.undo()
    assert rows.serve([], [], [[0, [token]]])[0] == {}, "a row that failed is gone"


def test_errors_are_the_grammars(masks: tuple[Masks, NDArray[np.int32]]) -> None:
    rows, _ = masks
    errors, _ = rows.serve([], [join(0, "start: nowhere", []), join(1, compiled("regex", "a"), [9, 9, 9])], [])
    assert "nowhere" in errors[0]
    assert 1 in errors
