"""Weights whose parts are tensors of files."""

from __future__ import annotations

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.stored import Stored


class StoredWeight(EncodedWeight):
    """A weight that has tensors of files as its attributes."""

    def let_go(self) -> None:
        for part in vars(self).values():
            if isinstance(part, Stored):
                part.let_go()
