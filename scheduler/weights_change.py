"""An order about the weights while it is carried out, and what it does to the files of a version.

Knows no worker's state but tasks and images.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from interfaces import (
    GENERATE,
    NO_IMAGES,
    WEIGHTS,
    WeightsAction,
    WeightsOrder,
    WeightsReport,
    WeightsTask,
    WeightsVersion,
)
from scheduler.workers import Worker
from shared.weights_file import Overlay, Served

# What workers are asked for an order about a group.
GROUP_TASKS = {
    WeightsAction.JOIN: WeightsTask.JOIN,
    WeightsAction.LEAVE: WeightsTask.LEAVE,
    WeightsAction.RECEIVE: WeightsTask.RECEIVE,
}


class Phase:
    """What an order waits for: answers of workers, the end of running requests, that of steps in flight.

    LED: that every worker has the version that is served.
    """

    ANSWERS = 0
    DRAIN = 1
    STILL = 2
    LED = 3


@dataclass(slots=True)
class Change:
    """The order that is carried out."""

    identity: bytes
    order: WeightsOrder
    # What the workers were asked last.
    task: int = -1
    phase: int = Phase.ANSWERS
    # Workers that have not answered, and those that have, with their reports.
    waiting: set[int] = field(default_factory=set)
    reports: dict[int, WeightsReport] = field(default_factory=dict)
    # The epochs of the workers that were asked, and the numbers of what they were asked.
    epochs: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    target: Served | None = None
    # Files that are removed unless they become part of the version.
    files: list[str] = field(default_factory=list)

    def alive(self, workers: Mapping[int, Worker]) -> set[int]:
        """The workers that were asked, but for those that have died since."""
        return {
            index for index, epoch in self.epochs.items() if index in workers and workers[index].hello.epoch == epoch
        }


def obstacle(order: WeightsOrder, workers: Collection[Worker], held: Collection[Overlay]) -> str:
    """Why an order cannot be carried out now; empty if it can. Files `held` were received for the next UPDATE."""
    if not workers:
        return "no model worker is ready: try again"
    if any(GENERATE not in worker.hello.tasks for worker in workers):
        return "only weights of models that generate text are changed while they run: restart the server"
    ranks = max(worker.hello.ranks for worker in workers)
    if ranks > 1 and order.action != WeightsAction.RENAME:
        return (
            f"the weights and the memory of a group of ranks (tensor_parallel {ranks}) are not changed while it runs: "
            "restart the server"
        )
    changes = order.action in (WeightsAction.UPDATE, WeightsAction.RECEIVE, WeightsAction.RELEASE)
    if changes and any(worker.hello.images != NO_IMAGES for worker in workers):
        return "this model takes images, and its weights are not changed while it runs: start it with --no-vision"
    if order.action == WeightsAction.UPDATE and not (order.source or order.overlays or held):
        return "no new weights were named or received"
    return ""


def version_after(
    served: Served, order: WeightsOrder, number: int, received: list[Overlay], overlays: list[Overlay]
) -> Served:
    """Return what an order serves in the place of `served`, with the files that were `received` before it, and its own.

    A source takes the place of all files before it.
    """
    every = needed(overlays if order.source else [*served.overlays, *received, *overlays])
    version = WeightsVersion(
        number, order.version or f"{number}", order.source or served.version.source, [overlay.path for overlay in every]
    )
    return Served(version, every, [tag for tag in served.absent if tag != WEIGHTS])


def needed(overlays: list[Overlay]) -> list[Overlay]:
    """Leave out files whose tensors all stand in later ones."""
    found: list[Overlay] = []
    later: set[str] = set()
    for overlay in reversed(overlays):
        if not overlay.names or not later.issuperset(overlay.names):
            found.append(overlay)
        later.update(overlay.names)
    return found[::-1]
