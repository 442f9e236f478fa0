"""What a worker says about blocks that it keeps beside its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from interfaces.wire.codec import F32, I32, message


@message(41)
@dataclass(slots=True)
class KvMoved:
    """Reports what a worker has done of `Step.save` and `Step.load`, in their order.

    The first `blocks[i]` blocks of ticket tickets[i] hold what their slots had; the next one, if there is one, could
    not be read. It took `seconds[i]`. The slots `skipped` were not written, for too much waits to be written, and
    `broken` ones cannot be used any more; `full`: the place has no room for slots that were never written.
    """

    incarnation: int
    epoch: int
    index: int
    tickets: I32
    blocks: I32
    seconds: F32
    skipped: I32
    broken: I32
    full: bool = False
