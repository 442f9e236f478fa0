"""A group of torch.distributed in which this process is a model worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from interfaces import GroupSpec, TensorSpec, WeightsCommand, WeightsTask
from model_worker.weights.groups import GroupRefused, Groups

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    """The groups of a worker with one that has no other member."""
    found = Groups(torch.device("cpu"), 1 << 20)
    found._carry_out(WeightsCommand(1, 0, 1, WeightsTask.JOIN, group=GroupSpec("g", "127.0.0.1", 0, 0, 1, "gloo")))
    yield found
    found._carry_out(WeightsCommand(1, 0, 3, WeightsTask.LEAVE, group=GroupSpec("g")))


@pytest.mark.parametrize("sender", [0, 1, -1])
def test_a_worker_never_sends(joined: Groups, tmp_path: Path, sender: int) -> None:
    """It would send what its memory had before."""
    path = tmp_path / "received.safetensors"
    command = WeightsCommand(
        1,
        0,
        2,
        WeightsTask.RECEIVE,
        group=GroupSpec("g"),
        tensors=[TensorSpec("a", "float32", [4])],
        sender=sender,
        path=f"{path}",
    )
    with pytest.raises(GroupRefused, match=f"src {sender} is not the rank of a trainer"):
        joined._carry_out(command)
    assert not path.exists()
