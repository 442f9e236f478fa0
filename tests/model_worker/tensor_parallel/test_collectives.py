"""What joins the ranks is chosen by their device, and a recorded step of a GPU has its sums in it.

On fake CUDA tensors (fake_gpu.py), with a group of torch's that sends nothing: what would wait for the device raises an
error. NCCL itself wants two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from model_worker.cuda.graphs import DecodeBuffers, DecodeGraphs
from model_worker.loading.prepare import prepare
from model_worker.runner import ModelRunner
from model_worker.tensor_parallel import collectives, load
from model_worker.tensor_parallel.collectives import Collectives, backend_for
from tests.model_worker.cuda.fake_gpu import DEVICE, fake_gpu, moved
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import counted_launches
from tests.model_worker.tiny_models import tiny_model

ROWS = 4


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_the_backend_is_that_of_the_device(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **more: asked.append((name, more["device_id"])))
    Collectives(0, 2, torch.device(device), tmp_path / "meeting")
    assert asked == [(backend, torch.device(device) if backend == "nccl" else None)]


def test_a_torch_without_nccl_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match=r"ranks on cuda:0 are joined by nccl, and torch .* was built without it"):
        backend_for(DEVICE)


class Joining:
    """Joins with parts that are all equal, until `then` does."""

    rank = 0
    then: Collectives | None = None

    def sum(self, part: Tensor) -> Tensor:
        return part if self.then is None else self.then.sum(part)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        if self.then is not None:
            return self.then.gather(part, widths)
        return torch.cat([part[..., :width] for width in widths], -1)


class Exchanges(TorchDispatchMode):
    """The names of collectives, while something is recorded and otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.names: list[tuple[bool, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.names.append((self.recording, func._schema.name))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unsent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of two ranks, of which this is the first, whose collectives send nothing."""
    # It says what collectives return for fake tensors.
    import torch.distributed._tools.fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin = dist.init_process_group
    monkeypatch.setattr(collectives, "backend_for", lambda _: "fake")

    def init(name: str, init_method: str, device_id: Any, **more: Any) -> None:
        begin(name, store=FakeStore(), **more)

    monkeypatch.setattr(dist, "init_process_group", init)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("unsent")
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_a_torch_that_has_the_gather_under_its_former_name_launches_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = Collectives(0, 2, torch.device("cpu"), tmp_path / "meeting")
    with Exchanges() as exchanges:
        joining.gather(torch.ones(3, 4), [5, 4])
        monkeypatch.delattr(dist, "all_gather_single")
        assert joining.gather(torch.ones(3, 4), [5, 4]).shape == (3, 9)
    assert exchanges.names == [(False, "c10d::_allgather_base_")] * 2


@pytest.mark.usefixtures("unsent")
def test_a_recorded_step_has_its_sums_in_it_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_triton()
    joining = Joining()
    monkeypatch.setattr(load, "prepare", partial(prepare, has_kernels=lambda *_: False))
    loaded = load.load_part(tiny_model("llama", tmp_path), "float32", 2, joining, lambda *_: None)
    loaded = replace(loaded, attention_name="triton", has_kernels=True)
    joining.then = Collectives(0, 2, torch.device("cpu"), tmp_path / "meeting")
    layers = len(loaded.attention.params)
    with fake_gpu(monkeypatch):
        backend: Any = ModelRunner(moved(loaded, torch.bfloat16), 8, 16).backend
        buffers = DecodeBuffers(ROWS, 4, 16, 8, DEVICE)
        exchanges = Exchanges()

        def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
            exchanges.recording = True
            result = function()
            exchanges.recording = False
            return lambda: result

        with counted_launches(monkeypatch, run=False) as launches, exchanges:
            graphs = DecodeGraphs(backend._forward, buffers, record)
            assert not launches.from_host
    sums = [(True, "c10d::allreduce_")] * 2 * layers
    assert exchanges.names == [*sums, (True, "c10d::_allgather_base_")] * len(graphs.sizes)
