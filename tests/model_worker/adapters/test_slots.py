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

from model_worker.adapters import slots
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
MAX_ROWS, MAX_LENGTH, MAX_TOKENS = 4, 64, 40


def low_rank(rank: int, inputs: int, outputs: int, scale: float = 1.0) -> AdaptedLinear:
    return AdaptedLinear(torch.randn(rank, inputs), torch.randn(outputs, rank), scale, None, None)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 5), (256, 128), (700, 300)])
def test_each_row_gets_the_product_of_its_slot(inputs: int, outputs: int) -> None:
    table = AdapterSlots(CPU, torch.float32)
    module = nn.Linear(inputs, outputs)
    adapters = {handle: low_rank(rank, inputs, outputs, 0.3 * handle) for handle, rank in ((1, 1), (2, 16), (3, 64))}
    for handle, linear in adapters.items():
        table.add(handle, Adapter("", 1, {module: linear}, None), {module: linear})
    handles = np.array([2, 0, 3, 1, 2, 0])
    x, y = torch.randn(len(handles), inputs), torch.randn(len(handles), outputs + 7)
    before, want = y.clone(), y.double()
    for row, handle in enumerate(handles.tolist()):
        if handle:
            one = adapters[handle]
            want[row, 3:-4] += one.scale * (x[row].double() @ one.a.double().T @ one.b.double().T)
    table.add_to(module, x, y[:, 3:-4], torch.from_numpy(table.column(handles)))
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(y[[1, 5]], before[[1, 5]]), "rows of the base model keep their bits"
    table.drop(2)
    assert not table.has_all(handles)
    y = before.clone()
    table.add_to(module, x, y, torch.full((6,), 1, dtype=torch.int32))
    assert torch.equal(y, before), "what an adapter has left adds nothing"


def test_only_plain_factors_get_a_slot() -> None:
    table = AdapterSlots(CPU, torch.float32)
    module = nn.Linear(8, 8)
    plain = low_rank(2, 8, 8)
    others = [
        low_rank(65, 8, 8),
        replace(plain, gain=torch.ones(8)),
        replace(plain, bias=torch.ones(8)),
        plain.placed(CPU, torch.bfloat16),
    ]
    for handle, linear in enumerate(others, 1):
        table.add(handle, Adapter("", 1, {module: linear}, None), {module: linear})
    assert not any(table.has_all(np.array([handle])) for handle in range(1, 5))
    for handle in range(10, 10 + SLOTS + 1):
        table.add(handle, Adapter("", 1, {module: plain}, None), {module: plain})
    assert table.has_all(np.arange(10, 10 + SLOTS))
    assert not table.has_all(np.array([10 + SLOTS])), "there are no more slots"
    assert table.generation == 1


def test_wrong_kernels_get_no_adapter(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(adapter_kernel, "add_low_rank", lambda y, *_: y.mul_(2))
    table = AdapterSlots(CPU, torch.float32)
    module = nn.Linear(8, 8)
    plain = low_rank(2, 8, 8)
    with caplog.at_level(logging.WARNING, slots.__name__):
        table.add(1, Adapter("", 1, {module: plain}, None), {module: plain})
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
    path = tiny_model("qwen2", tmp_path_factory.getbasetemp(), hidden_size=64)
    # Those of fewer modules, too, and of the head.
    recipes = {3: Recipe(rank=5), 8: Recipe(rank=20, targets=("q_proj", "v_proj", "down_proj", "lm_head"))}
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
    for _ in range(4):
        got = backend.logits(step(rows, new, handles))
        for row, handle, logits in zip(rows, handles, got, strict=True):
            with torch.no_grad():
                want = references[handle](input_ids=torch.tensor([row])).logits[0, -1]
            assert (logits - want).norm() < 1e-5 * want.norm()
            row.append(int(want.argmax()))
        counts.append(Recorder.count - before)
        new = [1, 1, 1]
    assert counts == ([1, 2, 2, 2] if recorded else [0] * 4), "each size is recorded once"
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


def test_steps_that_cannot_be_recorded_are_computed(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    runner = ModelRunner(loaded_model(path, True), 16, BLOCK)
    backend: Any = runner.backend
    monkeypatch.setattr(modules, "CudaRecorder", Recorder)
    runner.record(MAX_ROWS, MAX_LENGTH, 0)
    made = make(path, tmp_path / "1", Recipe(), 1)
    backend.load_adapter(1, str(made.folder))

    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(backend._adapted, "_recorded", full)
    rows = [[5, 6, 7]]
    backend.logits(step(rows, [3], [1]))
    got = backend.logits(step(rows, [1], [1]))
    with torch.no_grad():
        want = made.merged(input_ids=torch.tensor(rows)).logits[0, -1]
    assert (got[0] - want).norm() < 1e-5 * want.norm()
    assert "without graphs, which is slow: none is left" in caplog.text


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
