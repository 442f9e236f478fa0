"""Messages between the scheduler and a worker that paints: one denoising pass over images, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from interfaces.context.painting import PaintingContext
from interfaces.result.pooled_values import PooledValues
from interfaces.wire.codec import I32, message


@dataclass(frozen=True, slots=True)
class PixelJoin:
    """Begins an image under the number `row`, which no other image of this scheduler gets. The context has one
    image. With the `state` of a `KeptStep` as `kept` it goes on from there."""

    row: int
    context: PaintingContext
    kept: bytes = b""


@message(37)
@dataclass(slots=True)
class PixelStep:
    """One denoising pass on one worker. Order of effects: `drop`, `joins`, then one step of each image in `rows`.

    `incarnation` names the scheduler process; a worker that sees a new one forgets all images first. A row that the
    worker does not have (any more) is left out.
    """

    incarnation: int
    epoch: int
    number: int
    rows: I32
    drop: I32
    joins: list[PixelJoin]


@dataclass(frozen=True, slots=True)
class PixelPreview:
    """Preview `number`, from 1 on, of the image in `row`: the image that it is expected to become."""

    row: int
    number: int
    values: PooledValues


@dataclass(frozen=True, slots=True)
class KeptStep:
    """The image in `row` after `taken` passes, as the bytes by which another worker goes on with it."""

    row: int
    taken: int
    state: bytes


@message(38)
@dataclass(slots=True)
class PixelResult:
    """The result of a PixelStep: `images[i]` is that of row `finished[i]`, which has had its last step.

    The values of an image are f32[height, width * 3] between 0 and 1. `passes[i]` denoising passes are made in all for
    the image of the i-th of the step's `joins`; 0 if it failed. `errors` maps a row to the reason why it alone failed;
    the worker has it no more. `device_us` is the time of the pass in microseconds. Images and previews stand in shared
    memory, as the values of a `BatchResult` do. `kept` has images that go on, every few seconds.
    """

    incarnation: int
    epoch: int
    index: int
    number: int
    finished: I32
    images: list[PooledValues]
    passes: I32
    errors: dict[int, str]
    device_us: int
    previews: list[PixelPreview] = field(default_factory=list)
    kept: list[KeptStep] = field(default_factory=list)
