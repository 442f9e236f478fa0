"""Whether a card multiplies weights of four or eight bits as it should, and as fast as decoded ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from model_worker.cuda import timing
from model_worker.cuda.fp8_linear import TOLERANCE
from model_worker.cuda.grouped_linear import GroupedLinear

# Of each kind of tile, and of several. Outputs are rounded to the model's type once.
_TRIAL_TOKENS = (1, 17, 40, 130, 1200)
# A product whose parts are not waited for would differ from time to time.
_REPEATS = 3
# Tokens of the trials whose time is taken: steps of one answer, of few and of many, and with prompts.
_TIMED_TOKENS = (1, 16, 64, 128, 1024)


def unsupported(
    linear: GroupedLinear, device: torch.device, dtype: torch.dtype, tokens: tuple[int, ...] | None = None
) -> str:
    """Say why a device does not multiply tokens of `dtype` by this layer's weight as it should; empty if it does.

    So many `tokens` are tried, one number after the other; by default all kinds of tiles.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = linear.in_features
    try:
        weight = linear.weight.to(device)
        placed = linear.to(device)
        with torch.inference_mode():
            for count in tokens or _TRIAL_TOKENS:
                # Inputs of unlike sizes, so that a scale or an input in the wrong place shows.
                x = torch.randn(count, inputs, generator=generator) * torch.randn(inputs, generator=generator).exp()
                rows = x.to(device, dtype)
                more = torch.cat([rows, rows[:1]])
                want = functional.linear(rows.float(), weight)
                got = placed(rows)
                error = float(((got.float() - want).abs().amax(1) / want.abs().amax(1)).max())
                if not error <= TOLERANCE:
                    return f"products of {count} tokens are wrong by {error:.2g}"
                if not all(torch.equal(placed(rows), got) for _ in range(_REPEATS)):
                    return f"products of {count} tokens are not the same each time"
                if not torch.equal(placed(more)[0], got[0]):
                    return f"products of {count} tokens depend on those beside them"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a Triton, a compiler or a card without it
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def slower(make: Callable[[], GroupedLinear], shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> str:
    """Say that products with a layer of this shape [out, in], which is made, take longer than with a decoded weight, on
    a GPU; empty if not."""
    return timing.slower(make, shape, dtype, device, _TIMED_TOKENS)
