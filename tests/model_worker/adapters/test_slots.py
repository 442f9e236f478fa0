"""Adapters that kernels add, interpreted on a CPU: rows of several in one batch, in recorded steps, beside PEFT's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from model_worker.adapters import hooks, slots
from model_worker.adapters.experts import AdaptedExperts
from model_worker.adapters.fitting import AdaptedLinear, Adapter
from model_worker.adapters.slots import SLOTS, AdapterSlots
from model_worker.backends import modules
from model_worker.backends.fused_layers import FusedLayers
from model_worker.batch import ForwardBatch
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.adapters.made import Recipe, make
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import counted_launches
from tests.model_worker.tiny_models import VOCAB, tiny_model

need_triton()
peft: Any = pytest.importorskip("peft")

from model_worker.cuda import adapter_kernel  # noqa: E402

CPU = torch.device("cpu")
BLOCK = 16
MAX_ROWS, MAX_LENGTH, MAX_TOKENS = 3, 64, 24


def low_rank(rank: int, inputs: int, outputs: int, scale: float = 1.0) -> AdaptedLinear:
    return AdaptedLinear(torch.randn(rank, inputs), torch.randn(outputs, rank), scale, None, None)


def given(table: AdapterSlots, handle: int, module: nn.Module, linear: AdaptedLinear) -> None:
    table.add(handle, Adapter(f"digest{handle}", 1, {module: linear}, None))


def test_each_row_gets_the_product_of_its_slot() -> None:
    """As torch adds it, with a gain and biases, too."""
    inputs, outputs = 96, 130
    table = AdapterSlots(CPU, torch.float32, nn.Embedding(3, inputs))
    module = nn.Linear(inputs, outputs)
    adapters = {handle: low_rank(rank, inputs, outputs, 0.3 * handle) for handle, rank in ((1, 1), (2, 16), (3, 64))}
    adapters[2] = replace(adapters[2], gain=torch.randn(outputs), bias=torch.randn(outputs))
    adapters[3] = replace(adapters[3], gain=torch.randn(outputs))
    for handle, linear in adapters.items():
        given(table, handle, module, linear)
    handles = np.array([2, 0, 3, 1, 2, 0])
    x, y = torch.randn(len(handles), inputs), torch.randn(len(handles), outputs + 7)
    before, want = y.clone(), y.clone()
    for row, handle in enumerate(handles.tolist()):
        if handle:
            want[row, 3:-4] = hooks._adapted(module, adapters[handle], x[row], y[row, 3:-4])
    table.add_to(module, x, y[:, 3:-4], torch.from_numpy(table.column(handles)))
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(y[[1, 5]], before[[1, 5]]), "rows of the base model keep their bits"
    table.drop(2)
    assert not table.has_all(handles)
    y = before.clone()
    table.add_to(module, x, y, torch.full((6,), 1, dtype=torch.int32))
    assert torch.equal(y, before), "what an adapter has left adds nothing"


def test_a_module_that_no_adapter_has_costs_nothing() -> None:
    """Its table goes, and one for another module begins with zeros. Steps are recorded anew each time."""
    table = AdapterSlots(CPU, torch.float32, nn.Embedding(3, 8))
    both, one = nn.Linear(8, 8), nn.Linear(8, 8)
    table.add(1, Adapter("", 40, {both: low_rank(2, 8, 8), one: low_rank(40, 8, 8)}, None))
    given(table, 2, both, low_rank(2, 8, 8))
    generations = [table.generation]
    table.drop(1)
    assert set(table._tables) == {both}
    generations.append(table.generation)
    table.drop(2)
    assert not table._tables
    generations.append(table.generation)
    given(table, 3, one, low_rank(2, 8, 8))
    generations.append(table.generation)
    assert generations == [1, 2, 3, 4]
    assert table._tables[one].numbers.any(1).tolist() == [True] + [False] * (SLOTS - 1)
    assert table._tables[one].widest == 16


def test_an_adapter_read_again_takes_the_place_of_the_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    model = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False).model
    known = hooks.AdapterHooks(model, CPU, torch.float32, kernels=True)
    table: Any = known.slots
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    known.add(1, Adapter("", 2, {first: low_rank(2, 8, 8), second: low_rank(2, 8, 8)}, None))
    known.add(2, Adapter("", 2, {second: low_rank(2, 8, 8)}, None))
    known.add(1, Adapter("", 2, {first: low_rank(2, 8, 8)}, None))
    assert table.column(np.array([1, 2])).tolist() == [0, 1]
    assert table._tables[second].numbers.any(1).nonzero().flatten().tolist() == [1], "of what was there nothing stays"
    known.add(1, Adapter("", 2, {first: low_rank(513, 8, 8)}, None))
    assert not table.has_all(np.array([1])), "the second has no slot, and does not use that of the first"


def test_a_module_that_is_given_other_rows_is_refused() -> None:
    """Kernels would read slots that lie behind the step's."""
    table = AdapterSlots(CPU, torch.float32, nn.Embedding(3, 8))
    module = nn.Linear(8, 8)
    given(table, 1, module, low_rank(2, 8, 8))
    with pytest.raises(ValueError, match=r"a Linear with an adapter is given 4 rows, and the step has 3"):
        table.add_to(module, torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(3, dtype=torch.int32))


def test_what_kernels_cannot_compute_gets_no_slot_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    table = AdapterSlots(CPU, torch.float32, nn.Embedding(3, 8))
    module = nn.Linear(8, 8)
    plain = low_rank(2, 8, 8)
    experts = AdaptedExperts(None, None)
    others = (
        (Adapter("one", 1, {module: low_rank(513, 8, 8)}, None), "it has the rank 513"),
        (Adapter("two", 1, {module: plain.placed(CPU, torch.bfloat16)}, None), "its factors are not in torch.float32"),
        (Adapter("three", 1, {module: plain}, None, {module: experts}), "it adapts experts"),
    )
    for adapter, reason in others:
        with caplog.at_level(logging.WARNING, slots.__name__):
            table.add(1, adapter)
        assert not table.has_all(np.array([1]))
        assert f"adapter {adapter.digest} is computed group by group and not in recorded steps" in caplog.messages[-1]
        assert reason in caplog.messages[-1]
    for handle in range(10, 10 + SLOTS + 1):
        given(table, handle, module, plain)
    assert table.has_all(np.arange(10, 10 + SLOTS))
    assert not table.has_all(np.array([10 + SLOTS])), "there are no more slots"
    assert table.generation == 1


def test_steps_are_recorded_anew_for_more_ranks() -> None:
    """What lies between the factors has their room in a recorded step."""
    table = AdapterSlots(CPU, torch.float32, nn.Embedding(3, 8))
    module = nn.Linear(8, 8)
    generations = []
    for handle, rank in enumerate((2, 16, 17, 32, 200), 1):
        given(table, handle, module, low_rank(rank, 8, 8))
        generations.append(table.generation)
    assert generations == [1, 1, 2, 2, 3]


def test_a_want_of_memory_leaves_no_factors_in_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    table = AdapterSlots(CPU, torch.float32, nn.Embedding(3, 8))
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    zeros = torch.zeros

    def full(*shape: int, **named: Any) -> Tensor:
        if shape[0] == SLOTS:
            raise torch.OutOfMemoryError("none is left")
        return zeros(*shape, **named)

    given(table, 1, first, low_rank(2, 8, 8))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        both: dict[nn.Module, AdaptedLinear] = {first: low_rank(2, 8, 8), second: low_rank(2, 8, 8)}
        with pytest.raises(torch.OutOfMemoryError):
            table.add(2, Adapter("", 1, both, None))
    assert not table.has_all(np.array([2]))
    given(table, 3, second, low_rank(2, 8, 8))
    y = torch.randn(1, 8)
    got = y.clone()
    table.add_to(first, torch.randn(1, 8), got, torch.from_numpy(table.column(np.array([3]))))
    assert torch.equal(got, y)


@pytest.mark.parametrize("name", ["add_low_rank", "add_vectors"])
def test_wrong_kernels_get_no_adapter(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter_kernel, name, lambda y, *_: y.mul_(2))
    table = AdapterSlots(CPU, torch.float32, nn.Embedding(3, 8))
    # What was found out before counts no more, nor what is found out here.
    slots.unsupported.cache_clear()
    with caplog.at_level(logging.WARNING, slots.__name__):
        given(table, 1, nn.Linear(8, 8), low_rank(2, 8, 8))
    slots.unsupported.cache_clear()
    assert not table.has_all(np.array([1]))
    assert "rows are wrong by" in caplog.text


class Recorder:
    """Runs a function anew each time, as a replay would compute it."""

    count = 0

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        Recorder.count += 1
        function()
        return function


def loaded_model(path: Path, fuses: bool) -> LoadedModel:
    """Load a model as for a GPU with Triton's attention."""
    loaded = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    loaded = replace(loaded, attention_name="triton", has_kernels=True)
    return replace(loaded, layers=FusedLayers(loaded)) if fuses else loaded


def step(rows: list[list[int]], new: list[int], handles: list[int]) -> ForwardBatch:
    """A step that computes the last `new` tokens of each row, with the logits of the last one."""
    queries = np.array(new)
    tokens = np.concatenate([row[-count:] for row, count in zip(rows, new, strict=True)])
    tables = np.arange(len(rows) * 4).reshape(len(rows), 4)
    wanted = queries.cumsum() - 1
    lengths = np.array([len(row) for row in rows])
    return ForwardBatch.build(tokens, queries, lengths, tables, BLOCK, wanted, adapters=np.array(handles, np.int32))


@pytest.mark.parametrize(("fuses", "recorded"), [(True, True), (False, False)])
def test_rows_with_several_adapters_compute_as_peft_does(
    fuses: bool,
    recorded: bool,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_model("qwen2", tmp_path_factory.getbasetemp(), num_hidden_layers=1, layer_types=["full_attention"])
    # Those of fewer modules, too, of the head, and of tokens' vectors.
    some = ("embed_tokens", "q_proj", "v_proj", "down_proj", "lm_head")
    recipes = {3: Recipe(rank=5, dora=True), 8: Recipe(rank=20, targets=some, config={"use_rslora": True})}
    references = {0: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()}
    for handle, recipe in recipes.items():
        folder = make(path, tmp_path / str(handle), recipe, handle).folder
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        references[handle] = peft.PeftModel.from_pretrained(base, folder).eval()
    runner = ModelRunner(loaded_model(path, fuses), 16, BLOCK)
    backend: Any = runner.backend
    monkeypatch.setattr(modules, "CudaRecorder", Recorder)
    if recorded:
        runner.record(MAX_ROWS, MAX_LENGTH, MAX_TOKENS)
    for handle in recipes:
        backend.load_adapter(handle, str(tmp_path / str(handle)))
    before = Recorder.count
    rng = np.random.default_rng()
    handles = [3, 0, 8]
    rows = [rng.integers(3, VOCAB, length).tolist() for length in (7, 3, 12)]
    counts = []
    new = [len(row) for row in rows]
    for _ in range(3):
        got = backend.logits(step(rows, new, handles))
        for row, handle, logits in zip(rows, handles, got, strict=True):
            with torch.no_grad():
                want = references[handle](input_ids=torch.tensor([row])).logits[0, -1]
            assert (logits - want).norm() < 1e-5 * want.norm()
            row.append(int(want.argmax()))
        if recorded:
            assert got.data_ptr() == backend._mixed.logits.data_ptr(), "all sizes write their logits to one place"
        counts.append(Recorder.count - before)
        new = [1, 1, 1]
    assert counts == ([1, 2, 2] if recorded else [0] * 3), "each size is recorded once"
    # Without the second one its row is an error of the caller's; the first keeps its values.
    backend.drop_adapter(8)
    assert backend.logits(step(rows[:2], [1, 1], [3, 0])).isfinite().all()


def test_other_modules_are_recorded_anew(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    runner = ModelRunner(loaded_model(path, True), 16, BLOCK)
    backend: Any = runner.backend
    monkeypatch.setattr(modules, "CudaRecorder", Recorder)
    runner.record(MAX_ROWS, MAX_LENGTH, 0)
    rows = [[5, 6, 7]]
    folder = make(path, tmp_path / "1", Recipe(targets=("q_proj",)), 1).folder
    merged = make(path, tmp_path / "2", Recipe(targets=("q_proj", "up_proj"), rank=2), 2)
    backend.load_adapter(1, str(folder))
    backend.logits(step(rows, [3], [1]))
    first = backend.logits(step(rows, [1], [1])).clone()
    before = Recorder.count
    assert torch.equal(backend.logits(step(rows, [1], [1])), first)
    assert Recorder.count == before
    backend.load_adapter(2, str(merged.folder))
    backend.logits(step(rows, [3], [2]))
    got = backend.logits(step(rows, [1], [2]))
    assert Recorder.count == before + 1
    with torch.no_grad():
        want = merged.merged(input_ids=torch.tensor(rows)).logits[0, -1]
    assert (got[0] - want).norm() < 1e-5 * want.norm()


def test_an_adapter_that_comes_back_is_in_recorded_steps(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it was away, a step was recorded in which the head had no hook."""
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1, tie_word_embeddings=False)
    runner = ModelRunner(loaded_model(path, True), 16, BLOCK)
    backend: Any = runner.backend
    monkeypatch.setattr(modules, "CudaRecorder", Recorder)
    runner.record(MAX_ROWS, MAX_LENGTH, 0)
    both = make(path, tmp_path / "1", Recipe(targets=("q_proj", "lm_head")), 1)
    backend.load_adapter(1, str(both.folder))
    backend.load_adapter(2, str(make(path, tmp_path / "2", Recipe(targets=("q_proj",)), 2).folder))
    rows = [[5, 6, 7]]
    backend.drop_adapter(1)
    backend.logits(step(rows, [3], [2]))
    before = Recorder.count
    backend.logits(step(rows, [1], [2]))
    backend.load_adapter(1, str(both.folder))
    backend.logits(step(rows, [3], [1]))
    got = backend.logits(step(rows, [1], [1]))
    assert Recorder.count == before + 2
    with torch.no_grad():
        want = both.merged(input_ids=torch.tensor(rows)).logits[0, -1]
    assert (got[0] - want).norm() < 1e-5 * want.norm()


def test_a_size_that_cannot_be_recorded_is_computed(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others are recorded, and this one once adapters change."""
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    runner = ModelRunner(loaded_model(path, True), 16, BLOCK)
    backend: Any = runner.backend
    monkeypatch.setattr(modules, "CudaRecorder", Recorder)
    runner.record(MAX_ROWS, MAX_LENGTH, 0)
    made = make(path, tmp_path / "1", Recipe(targets=("q_proj",)), 1)
    backend.load_adapter(1, str(made.folder))

    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError("none is left")

    rows = [[5, 6, 7]]
    backend.logits(step(rows, [3], [1]))
    before = Recorder.count
    with monkeypatch.context() as patch:
        patch.setattr(backend._adapted, "_recorded", full)
        got = backend.logits(step(rows, [1], [1]))
    with torch.no_grad():
        want = made.merged(input_ids=torch.tensor(rows)).logits[0, -1]
    assert (got[0] - want).norm() < 1e-5 * want.norm()
    said = "steps of 1 rows with adapters are computed without graphs, which is slow, until adapters change: none is"
    assert said in caplog.text
    backend.logits(step(rows, [1], [1]))
    assert Recorder.count == before
    backend.logits(step(rows * 2, [3, 3], [1, 1]))
    backend.logits(step(rows * 2, [1, 1], [1, 1]))
    assert Recorder.count == before + 1
    backend.load_adapter(2, str(make(path, tmp_path / "2", Recipe(targets=("up_proj",)), 2).folder))
    backend.logits(step(rows, [1], [1]))
    assert Recorder.count == before + 2


def test_two_launches_for_each_adapted_module(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    backend: Any = ModelRunner(loaded_model(path, True), 16, BLOCK).backend
    backend.load_adapter(1, str(make(path, tmp_path / "1", Recipe(), 1).folder))
    names = []
    for handles in ([1], None):
        batch = step([[5, 6, 7]], [3], [1])
        with counted_launches(monkeypatch) as launches:
            backend.logits(batch if handles else replace(batch, adapters=None))
        names.append(launches.names)
    assert names[0].count("shrink_kernel") == names[0].count("expand_kernel") == 7
    assert not {"shrink_kernel", "expand_kernel"} & set(names[1])
    # What brings the slots of tokens to the device, and chooses those whose logits are wanted.
    assert len(names[0]) <= len(names[1]) + 2 * 7 + 4
