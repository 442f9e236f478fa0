"""Messages about a model's weights: an operator's orders to the scheduler, and what a worker does with its weights.

The scheduler owns the version that is served. A version is a checkpoint and files of tensors that replace some of its
own, so a worker that starts later reads the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from interfaces.wire.codec import F32, message

# Tags of memory that can be released.
WEIGHTS = "weights"
KV_CACHE = "kv_cache"
# Name of the version with which a server starts.
FIRST_VERSION = "default"


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A version of the weights: those in `source`, with the tensors of `overlays`, of which later ones win.

    `number` tells versions apart, whatever their `name` is; 0 is the version of the settings' own model. An empty
    `source` is that model. `stamp` names the files as they were when they were read (empty: any).
    """

    number: int
    name: str
    source: str = ""
    overlays: list[str] = field(default_factory=list)
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that comes over a group. `dtype` is torch's name of it, such as bfloat16."""

    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group of processes of torch.distributed. In an order `rank` is that of the first worker; others follow.

    `packed`: the trainer sends the bytes of several tensors at a time, as vLLM's trainers do: as many as it takes to
    exceed `packed_bytes`. 0: as at the group's JOIN, or 1 GiB.
    """

    name: str
    address: str = ""
    port: int = 0
    rank: int = 0
    world_size: int = 0
    backend: str = "gloo"
    packed: bool = False
    packed_bytes: int = 0


class WeightsAction:
    """Codes of `WeightsOrder.action`.

    UPDATE serves another version: a `source`, or further `overlays`, or what was received and is held. RELEASE gives
    memory back (`tags`), and RESUME takes it again. JOIN and LEAVE a group. RECEIVE tensors over it from `sender`, and
    serve them, or `hold` them for the next UPDATE. READ a weight. RENAME the version.
    """

    UPDATE = 0
    RELEASE = 1
    RESUME = 2
    JOIN = 3
    LEAVE = 4
    RECEIVE = 5
    READ = 6
    RENAME = 7


class RunningMode:
    """Codes of `WeightsOrder.running`: what becomes of requests when the weights change.

    With WAIT the running ones end first, and new ones are kept waiting. With KEEP they go on from where they are, on
    the K and V that they have. With RETRACT what they have is computed again with the new weights. With ABORT they end.
    """

    WAIT = 0
    KEEP = 1
    RETRACT = 2
    ABORT = 3


@message(30)
@dataclass(frozen=True, slots=True)
class WeightsOrder:
    """An operator's order about weights. `number` is the replica's name for it, and comes back in the answer.

    `version` names the new version; empty: the scheduler makes a name. The files of `overlays` are the scheduler's from
    now on. READ is about the first `most` rows of the weight `name`.
    """

    number: int
    action: int
    version: str = ""
    source: str = ""
    overlays: list[str] = field(default_factory=list)
    running: int = RunningMode.WAIT
    tags: list[str] = field(default_factory=list)
    group: GroupSpec | None = None
    sender: int = 0
    tensors: list[TensorSpec] = field(default_factory=list)
    name: str = ""
    most: int = 0
    hold: bool = False


@message(31)
@dataclass(frozen=True, slots=True)
class WeightsAnswer:
    """Answers a `WeightsOrder`: it was carried out, unless `refused` has a reason; then the old weights are served.

    `unavailable`: no worker could be asked, so the same order may succeed later. `version` is the one that is served.
    `values` are a weight's, in the order of its rows, and `shape` is theirs. `requests` are open and were there before.
    """

    incarnation: int
    number: int
    refused: str
    version: str
    unavailable: bool = False
    values: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    shape: list[int] = field(default_factory=list)
    requests: int = 0


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """The version that is served, and the tags of memory that was released. `changing`: an order is carried out."""

    number: int
    name: str
    source: str
    absent: list[str]
    changing: bool


class WeightsTask:
    """Codes of `WeightsCommand.task`.

    PREPARE reads a version beside the one that is used, and USE of the same `version` takes its place between two
    steps; ABANDON forgets it.
    The other tasks are as in `WeightsAction`; RECEIVE writes the tensors to `path`.
    """

    PREPARE = 0
    USE = 1
    ABANDON = 2
    RELEASE = 3
    RESUME = 4
    JOIN = 5
    LEAVE = 6
    RECEIVE = 7
    READ = 8


@message(32)
@dataclass(frozen=True, slots=True)
class WeightsCommand:
    """Asks a worker for something about its weights. It answers `WeightsReport` with the same `number`, but no ABANDON.

    Tasks other than JOIN, LEAVE and RECEIVE are carried out between two steps. A worker that hears of a new incarnation
    forgets what it has prepared.
    """

    incarnation: int
    epoch: int
    number: int
    task: int
    version: WeightsVersion | None = None
    tags: list[str] = field(default_factory=list)
    group: GroupSpec | None = None
    sender: int = 0
    tensors: list[TensorSpec] = field(default_factory=list)
    path: str = ""
    name: str = ""
    most: int = 0


@message(33)
@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Answers a `WeightsCommand`. `error` says why it was not carried out; then nothing has changed on the worker.

    `stamp` names the files that were read.
    """

    incarnation: int
    epoch: int
    index: int
    number: int
    error: str = ""
    stamp: str = ""
    values: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    shape: list[int] = field(default_factory=list)
