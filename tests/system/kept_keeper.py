"""The keeper of a worker's weights, in memory of the host."""

from __future__ import annotations

from model_worker.keeper import __main__ as keeper
from model_worker.keeper import cuda_pieces
from tests.model_worker.keeper.host_pieces import HostPieces

if __name__ == "__main__":
    cuda_pieces.CudaPieces = HostPieces  # type: ignore[assignment, misc]
    keeper.main()
