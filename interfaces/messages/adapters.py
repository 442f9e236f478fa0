"""Messages about adapters: an operator's orders to the scheduler, and what a worker loads and drops.

The scheduler owns the names. A worker knows adapters by handles, which the scheduler gives out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from interfaces.request.lora import LoRARequest, LoRAStatus
from interfaces.wire.codec import message


class AdapterState:
    """Codes of `AdapterStatus.state`.

    A LOADING adapter has not been checked by the workers yet. A READY one takes requests. A LEAVING one has lost its
    name: the requests that use it go on, and new ones cannot.
    """

    LOADING = 0
    READY = 1
    LEAVING = 2


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """An adapter that the scheduler has.

    `handle` tells it from others of the same name. `digest` names its content, `size` is its memory in bytes on a
    worker, `requests` counts the open ones that use it, and `workers` those that hold it in memory now.
    """

    handle: int
    name: str
    path: str
    digest: str
    rank: int
    size: int
    pinned: bool
    state: int
    requests: int
    workers: int


@message(24)
@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Asks a worker to load the adapter in the folder `path`, whose content must have this `digest` (empty: any).

    The worker answers `AdapterLoaded` or `AdapterFailed`. It reads the files beside its steps, so answers may come in
    another order than the questions. A handle is given once. A worker that hears of a new incarnation forgets all
    adapters first.
    """

    incarnation: int
    epoch: int
    handle: int
    path: str
    digest: str = ""


@message(25)
@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Asks a worker to free an adapter, or to stop loading it. No row uses it. There is no answer."""

    incarnation: int
    epoch: int
    handle: int


@message(26)
@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Answers `LoadAdapter`: rows with this handle can be computed. `size` is the adapter's memory in bytes.

    `digest` is that of the files that were read. `rank` is the largest of its layers.
    """

    incarnation: int
    epoch: int
    index: int
    handle: int
    digest: str
    rank: int
    size: int


@message(27)
@dataclass(frozen=True, slots=True)
class AdapterFailed:
    """Answers `LoadAdapter`: the adapter cannot be used, for this `reason`.

    `digest` is that of the files, where they could be read. `missing`: there is no adapter at the path.
    """

    incarnation: int
    epoch: int
    index: int
    handle: int
    digest: str
    reason: str
    missing: bool = False


@message(28)
@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """An operator's order to load or unload an adapter. `number` is the replica's name for it, and comes back in the
    answer.

    `replace`: an adapter of this name makes room for the new one; without it the name must be free. A `pinned` one
    stays in the workers' memory.
    """

    number: int
    request: LoRARequest
    pinned: bool = False
    replace: bool = False


@message(29)
@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """Answers an `AdapterOrder`, with the adapters that are there now.

    After an order to unload `requests` counts the open ones that still use an adapter of this name.
    """

    incarnation: int
    number: int
    status: LoRAStatus
    text: str
    requests: int = 0
    adapters: list[AdapterStatus] = field(default_factory=list)
