"""A pass for which rank 0 alone has no memory ends a group on GPUs, whose other ranks have launched it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.passes import GroupBackend

BLOCK_SIZE = 4


class Full:
    """A part whose device has no memory, and what takes messages and tensors to other ranks."""

    device = torch.device("cpu")
    vocab_size = 9

    def __init__(self) -> None:
        self.sent = 0

    def logits(self, batch: ForwardBatch) -> Tensor:
        raise torch.OutOfMemoryError(f"no memory for {batch.num_tokens} tokens\nand more lines")

    hidden = logits

    def send(self, message: bytes) -> None:
        self.sent += 1

    def give(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize("name", ["logits", "hidden"])
def test_a_pass_without_memory_is_not_repeated_in_a_group(name: str) -> None:
    one = np.ones(1, np.int32)
    batch = ForwardBatch.build(np.zeros(1, np.int64), one, one, np.zeros((1, 1), np.int32), BLOCK_SIZE, one - 1)
    full: Any = Full()
    with pytest.raises(GroupLost, match=r"rank 0 has no memory for a step; .*\(no memory for 1 tokens\)$"):
        getattr(GroupBackend(full, BLOCK_SIZE, full, full), name)(batch)
    assert full.sent == 1
    # Ranks on CPUs have come to no exchange of the pass that was not begun, and wait.
    with pytest.raises(torch.OutOfMemoryError):
        getattr(GroupBackend(full, BLOCK_SIZE, full), name)(batch)
