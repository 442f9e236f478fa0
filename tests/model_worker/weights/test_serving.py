"""Versions of a tiny model's weights on one worker: they come and go, and what cannot be used changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from interfaces import WEIGHTS, WeightsCommand, WeightsReport, WeightsTask, WeightsVersion, WorkerHello
from model_worker.cpu.fused import stack
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from model_worker.weights.commands import WeightsCommands
from model_worker.weights.groups import Groups
from model_worker.weights.serving import Load, ServedModel
from tests.model_worker.tiny_models import tiny_model

# Fewer than the tiny model's positions, more than those of a shorter one.
MAX_MODEL_LEN = 256


def loader(has_kernels: bool) -> Load:
    """Load models as a worker does, in the fused stack or in plain torch."""

    def load(source: str, overlays: list[Path]) -> LoadedModel:
        return load_model(
            source,
            "float32",
            "cpu",
            lambda *_: None,
            max_model_len=MAX_MODEL_LEN,
            has_kernels=lambda *_: has_kernels,
            overlays=overlays,
        )

    return load


class TinyWorker:
    """The weights of one worker, without rows."""

    def __init__(self, own: Path, load: Load) -> None:
        self.own = own
        runner = ModelRunner(load(str(self.own), []), 8)
        version = WeightsVersion(0, "default")
        self.served = ServedModel(runner, version, str(self.own), load, lambda _: None, lambda _: None, None)
        hello = WorkerHello("cpu", 0, 0, 1, 8, 16, 4, MAX_MODEL_LEN, 193, "llama", "float32", "cpu")
        self.commands = WeightsCommands(self.served, Groups(torch.device("cpu"), 1 << 20), hello)
        self.number = 0

    def ask(self, task: int, **facts: object) -> WeightsReport:
        self.number += 1
        report = self.commands.obey(WeightsCommand(1, 0, self.number, task, **facts))  # type: ignore[arg-type]
        assert report is not None
        return report

    def change(self, number: int, source: str) -> None:
        """Serve other weights."""
        version = WeightsVersion(number, str(number), source)
        for task in (WeightsTask.PREPARE, WeightsTask.USE):
            assert self.ask(task, version=version).error == ""

    def logits(self) -> torch.Tensor:
        runner = self.served.runner
        return runner.backend.logits(runner._first_tokens(20))


@pytest.fixture
def worker(tmp_path_factory: pytest.TempPathFactory) -> TinyWorker:
    return TinyWorker(tiny_model("llama", tmp_path_factory.getbasetemp()), loader(has_kernels=False))


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.getbasetemp(), seed=1)


@pytest.mark.parametrize("threads", [1, 2])
def test_released_weights_come_back_and_others_come_in_their_place(
    tmp_path_factory: pytest.TempPathFactory, other: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Also where the stack launches ahead, as with several threads."""
    monkeypatch.setattr(stack, "WORTH_OVERLAPPING", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    worker = TinyWorker(tiny_model("llama", tmp_path_factory.getbasetemp()), loader(has_kernels=True))
    assert worker.served.runner.backend.overlaps == (threads == 2)
    expected = worker.logits()
    for _ in range(2):
        assert worker.ask(WeightsTask.RELEASE, tags=[WEIGHTS]).error == ""
        assert worker.served.absent == {WEIGHTS}
        assert worker.ask(WeightsTask.RESUME, tags=[WEIGHTS]).error == ""
        assert torch.equal(worker.logits(), expected)
    worker.ask(WeightsTask.RELEASE, tags=[WEIGHTS])
    version = WeightsVersion(1, "other", str(other))
    assert worker.ask(WeightsTask.PREPARE, version=version).error == ""
    assert worker.ask(WeightsTask.USE, version=version).error == ""
    fresh = ModelRunner(loader(True)(str(other), []), 8)
    assert torch.equal(worker.logits(), fresh.backend.logits(fresh._first_tokens(20)))


def test_released_weights_whose_files_have_changed_are_served_only_as_another_version(
    worker: TinyWorker, other: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(worker.own, folder)
    for number in (1, 2):
        version = WeightsVersion(number, str(number), str(folder))
        assert worker.ask(WeightsTask.PREPARE, version=version).error == ""
        assert worker.ask(WeightsTask.USE, version=version).error == ""
        if number == 1:
            worker.ask(WeightsTask.RELEASE, tags=[WEIGHTS])
            shutil.copy(other / "model.safetensors", folder)
            error = worker.ask(WeightsTask.RESUME, tags=[WEIGHTS]).error
            assert "have changed since they were read: POST /update_weights_from_disk" in error
    fresh = ModelRunner(loader(False)(str(other), []), 8)
    assert torch.equal(worker.logits(), fresh.backend.logits(fresh._first_tokens(20)))


def test_files_that_are_wrong_in_any_way_are_refused(worker: TinyWorker, tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(b"GGUF\3\0\0\0\1")
    short = tmp_path / "short"
    shutil.copytree(worker.own, short)
    config = (short / "config.json").read_text()
    (short / "config.json").write_text(
        config.replace('"max_position_embeddings": 512', '"max_position_embeddings": 128')
    )
    expected = worker.logits()
    for path, part in ((empty, "empty.gguf"), (cut, "cut.gguf"), (short, "128")):
        report = worker.ask(WeightsTask.PREPARE, version=WeightsVersion(1, "x", str(path)))
        assert part in report.error
    assert torch.equal(worker.logits(), expected)


def test_an_error_of_ours_while_a_version_is_read_is_reported(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(source: str, overlays: list[Path]) -> LoadedModel:
        raise KeyError("general.architecture")

    monkeypatch.setattr(worker.served, "_load", fails)
    assert "KeyError" in worker.ask(WeightsTask.PREPARE, version=WeightsVersion(1, "x", str(worker.own))).error


def test_weights_are_refused_that_do_not_fit_beside_those_that_are_served(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose files are not here, as of a name on the hub, or are smaller than what is made of them."""
    monkeypatch.setattr("model_worker.weights.serving.bytes_of", lambda source, overlays: 0)
    version = WeightsVersion(1, "x", str(worker.own))
    size = worker.served.loaded.parameter_bytes
    monkeypatch.setattr("model_worker.weights.serving.free_memory", lambda: size)
    assert f"{size} are free: give the old ones back first" in worker.ask(WeightsTask.PREPARE, version=version).error
    monkeypatch.setattr("model_worker.weights.serving.free_memory", lambda: 2 * size)
    assert worker.ask(WeightsTask.PREPARE, version=version).error == ""


def test_only_the_version_that_is_meant_is_used(worker: TinyWorker, other: Path) -> None:
    expected = worker.logits()
    first = WeightsVersion(1, "one", str(other))
    worker.ask(WeightsTask.PREPARE, version=first)
    worker.ask(WeightsTask.PREPARE, version=WeightsVersion(2, "two", str(other)))
    report = worker.ask(WeightsTask.USE, version=first)
    assert "version 2 was prepared" in report.error
    assert (worker.served.version.number, torch.equal(worker.logits(), expected)) == (0, True)


def test_too_many_values_are_refused_before_they_are_converted(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.norm.weight"
    assert worker.ask(WeightsTask.READ, name=name, most=3).shape == [3]
    monkeypatch.setattr("model_worker.weights.serving.MOST_VALUES", 40)

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{tuple(tensor.shape)} were converted")

    monkeypatch.setattr(torch.Tensor, "float", converted)
    assert "asks for 48 numbers" in worker.ask(WeightsTask.READ, name=name, most=1 << 20).error
