"""A CPU worker that leaves linear modules as they are, as a GPU's does, and gets kept weights in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from model_worker import __main__ as worker
from model_worker.keeper import cuda_pieces
from model_worker.loading import load
from model_worker.loading.prepare import prepare
from model_worker.model import LoadedModel
from tests.model_worker.keeper.host_pieces import HostPieces


def unpacked(prepare: Callable[..., LoadedModel]) -> Callable[..., LoadedModel]:
    def prepared(model: Any, device: Any, quantization: str, progress: Any, _: Any, *rest: Any) -> LoadedModel:
        loaded = prepare(model, device, quantization, progress, lambda *_: False, *rest)
        return replace(loaded, has_kernels=True)

    return prepared


if __name__ == "__main__":
    cuda_pieces.CudaPieces = HostPieces  # type: ignore[assignment, misc]
    load.prepare = unpacked(prepare)  # type: ignore[attr-defined]
    worker.main()
