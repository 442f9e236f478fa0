"""What works beside the steps of a worker, on threads or in processes of its own. Does not know what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from model_worker.adapter_loads import AdapterLoads
from model_worker.kv_spill.mover import KvMover
from model_worker.kv_spill.shipper import KvShipper
from model_worker.vision.encode_queue import EncodeQueue
from model_worker.weights.commands import WeightsCommands

if TYPE_CHECKING:
    from model_worker.speech.clip_thread import ClipThread


class Reporting(Protocol):
    """Works beside the steps, and has something to say about it now and then."""

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        ...

    def take(self) -> Sequence[Any]:
        """Messages for the scheduler."""
        ...


@dataclass(frozen=True)
class Beside:
    """None stands for what a worker does not have."""

    # Images that are being encoded.
    encoding: EncodeQueue | None = None
    # Adapters that are being read.
    adapters: AdapterLoads | None = None
    weights: WeightsCommands | None = None
    # Blocks that go to a place beside the KV cache, and come back.
    moves: KvMover | None = None
    # Sends blocks to other workers.
    shipper: KvShipper | None = None
    # Clips of voices that are being encoded.
    clips: ClipThread | None = None

    @property
    def reporting(self) -> list[Reporting]:
        """Those whose messages go to the scheduler as they are."""
        every: tuple[Reporting | None, ...] = self.adapters, self.weights, self.moves, self.shipper, self.clips
        return [each for each in every if each is not None]


NOTHING_BESIDE = Beside()
