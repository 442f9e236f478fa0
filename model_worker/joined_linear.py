"""A linear layer of one rank, whose outputs are joined with those of the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class JoinedLinear(nn.Module):
    """A linear layer with a rank's part of the weights, whose outputs are joined with those of the others.

    The layer is a module of its own, which may be packed as others are. With a `taken` range it gets that part of the
    input.
    """

    def __init__(self, part: nn.Linear, join: Callable[[Tensor], Tensor], taken: tuple[int, int] | None) -> None:
        super().__init__()
        self.part = part
        self._join = join
        self._taken = taken
        self._apart = False

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute this rank's part, and join it."""
        if self._taken is not None:
            first, end = self._taken
            inputs = inputs[..., first:end].contiguous()
        own: Tensor = self.part(inputs)
        return own if self._apart else self._join(own)


@contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Have a module compute with this rank's parts alone, within this context: the others need not be there."""
    layers = [layer for layer in module.modules() if isinstance(layer, JoinedLinear)]
    for layer in layers:
        layer._apart = True
    try:
        yield
    finally:
        for layer in layers:
            layer._apart = False
