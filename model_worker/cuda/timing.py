"""Whether products of a kind are as fast on this card as those with decoded weights. Knows calls only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    try:
        linear = make()
        plain = torch.randn(shape, device=device, dtype=dtype)
        for count in counts:
            x = torch.randn(count, shape[1], device=device, dtype=dtype)
            with torch.inference_mode():
                own = milliseconds(lambda x=x: linear(x))  # type: ignore[misc]
                other = milliseconds(lambda x=x: functional.linear(x, plain))  # type: ignore[misc]
            if own > _SLOWER * other:
                return f"a product of {count} tokens takes {own:.3g} ms, and {other:.3g} ms with a decoded weight"
    except Exception as error:  # of a Triton, a compiler or a card without it, and of one without the memory
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"its products cannot be timed: {reason}"
    return ""


def milliseconds(call: Callable[[], Tensor]) -> float:
    """Return the median time of a call on a GPU whose cache has been filled with something else."""
    from triton.testing import do_bench

    found: float = do_bench(call, warmup=5, rep=30, return_mode="median")
    return found
