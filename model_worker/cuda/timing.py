"""Whether products of a kind are as fast on this card as those with decoded weights. Knows calls only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger(__name__)

Call = Callable[[], Tensor]
Calls = Callable[[int], tuple[Call, Call]]
# How much longer a product may take: times vary by some hundredths.
_SLOWER = 1.05


def slower(
    make: Callable[[], nn.Module],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    counts: Sequence[int],
) -> str:
    """Say that products of a layer that is made take longer than those of a decoded weight of this shape [out, in] for
    one of these counts of tokens; empty if not. Where they cannot be timed, it says that."""

    def calls() -> Calls:
        linear = make()
        plain = torch.randn(shape, device=device, dtype=dtype)

        def of(count: int) -> tuple[Call, Call]:
            x = torch.randn(count, shape[1], device=device, dtype=dtype)
            return lambda: linear(x), lambda: functional.linear(x, plain)

        return of

    return slower_calls(calls, counts)


def slower_calls(make: Callable[[], Calls], counts: Sequence[int]) -> str:
    """Say that the first of two calls takes longer than the second, which are made for each of these counts of tokens;
    empty if not. Where they cannot be timed, it says that; but where there is no memory for it, since there is none for
    decoded weights, either, it is empty."""
    try:
        calls = make()
        for count in counts:
            with torch.inference_mode():
                own, other = (milliseconds(call) for call in calls(count))
            if own > _SLOWER * other:
                return f"a product of {count} tokens takes {own:.3g} ms, and {other:.3g} ms with a decoded weight"
    except torch.OutOfMemoryError:
        log.info("products are not timed, and weights stay as they are: the card has no memory for a decoded one")
    except Exception as error:  # of a Triton, a compiler or a card without it
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"its products cannot be timed: {reason}"
    return ""


def milliseconds(call: Callable[[], Tensor]) -> float:
    """Return the median time of a call on a GPU whose cache has been filled with something else."""
    from triton.testing import do_bench

    found: float = do_bench(call, warmup=5, rep=30, return_mode="median")
    return found
