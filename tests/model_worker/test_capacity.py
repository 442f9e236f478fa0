"""How many blocks and which length a device gets, by what the memory and the model allow."""

from __future__ import annotations

import pytest

from model_worker.capacity import Capacity, capacity_for
from model_worker.model import LoadedModel
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.model_worker.tiny_models import tiny_model
from tests.system.in_process import load

BLOCK = 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("models")))


def memory_for(loaded: LoadedModel, blocks: int) -> int:
    return loaded.attention.layout.bytes_per_block(BLOCK) * blocks


def test_memory_that_no_request_could_fill_is_not_taken(loaded: LoadedModel) -> None:
    plenty = memory_for(loaded, 10_000)
    assert capacity_for(loaded, plenty, 40, 3, BLOCK) == Capacity(9, BLOCK, 3, 40)
    # The model has 512 positions.
    assert capacity_for(loaded, plenty, None, 2, BLOCK) == Capacity(64, BLOCK, 2, 512)


def test_little_memory_bounds_the_length(loaded: LoadedModel) -> None:
    assert capacity_for(loaded, memory_for(loaded, 5), None, 8, BLOCK) == Capacity(5, BLOCK, 8, 80)


def test_recurrent_states_are_taken_from_the_memory(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    hybrid = load(tiny_hybrid("lfm2", tmp_path_factory.getbasetemp()))
    assert hybrid.recurrent is not None
    state, block = hybrid.recurrent.layout.bytes_per_row, memory_for(hybrid, 1)
    assert state == 3 * 48 * 3 * 4
    assert capacity_for(hybrid, 9 * block + 3 * state, None, 3, BLOCK) == Capacity(9, BLOCK, 3, 9 * BLOCK)
    assert "sequences run together" not in caplog.text
    few = capacity_for(hybrid, 4 * state, None, 8, BLOCK)
    assert (few.max_rows, few.num_blocks) == (2, 2 * state // block)
    assert "at most 2 sequences run together, and not 8 as max_running says" in caplog.text
    short = few.num_blocks * BLOCK
    assert few.max_model_len == short
    assert f"a sequence has at most {short} tokens, and not the model's 512: the recurrent states of 2" in caplog.text
    takes = f"the recurrent state of one sequence takes {state} bytes, and its K and V {block}; raise kv_memory$"
    with pytest.raises(ValueError, match=takes):
        capacity_for(hybrid, state, None, 8, BLOCK)


def test_recurrent_states_leave_room_for_one_sequence_of_the_length_that_is_wanted(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    hybrid = load(tiny_hybrid("lfm2", tmp_path_factory.getbasetemp()))
    assert hybrid.recurrent is not None
    state, sequence = hybrid.recurrent.layout.bytes_per_row, memory_for(hybrid, 32)
    # More than half of the memory.
    assert capacity_for(hybrid, sequence + 3 * state, 512, 8, BLOCK) == Capacity(32, BLOCK, 3, 512)
    assert "at most 3 sequences run together, and not 8 as max_running says" in caplog.text
    assert "raise kv_memory, or lower max_model_len" in caplog.text
    assert "a sequence has at most" not in caplog.text
    # Of a short one, states take no more than half.
    assert capacity_for(hybrid, 16 * state, 16, 20, BLOCK).max_rows == 8
    alone = "max_model_len 512 does not fit, even with max_running 1: kv memory of .* or lower max_model_len$"
    with pytest.raises(ValueError, match=alone):
        capacity_for(hybrid, sequence + state - 1, 512, 8, BLOCK)
    assert capacity_for(hybrid, sequence + state, 512, 8, BLOCK).max_rows == 1


def test_a_length_that_does_not_fit_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 512 positions, got 513"):
        capacity_for(loaded, None, 513, 1, BLOCK)
    with pytest.raises(ValueError, match="max_model_len 100 does not fit the KV memory, which holds 80 tokens; raise"):
        capacity_for(loaded, memory_for(loaded, 5), 100, 1, BLOCK)
