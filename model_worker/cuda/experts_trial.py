"""Whether a card multiplies stacks of experts as it should, and as fast as torch multiplies decoded ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from model_worker.cuda import timing
from model_worker.cuda.encoded_experts import ExpertStack, Fp8Experts
from model_worker.cuda.fp8_blocks import SIDE, rounded_groups
from model_worker.cuda.fp8_linear import TOLERANCE, lacks_fp8
from model_worker.cuda.routing import route

# Tokens of each kind of tile.
_TRIAL_TOKENS = (1, 40, 200)
_CHOSEN = 2
# Tokens of the trials whose time is taken, each with so many of so many experts.
_TIMED_TOKENS = (1, 16, 64)
_TIMED_CHOSEN = 8
_TIMED_EXPERTS = 32


def unsupported(stack: ExpertStack, weight: Tensor, device: torch.device, dtype: torch.dtype) -> str:
    """Say why a device does not multiply tokens of `dtype` by these experts, whose decoded weight is f32 [experts, out,
    in], as it should; empty if it does."""
    if isinstance(stack, Fp8Experts) and (reason := lacks_fp8(device)):
        return reason
    generator = torch.Generator().manual_seed(0)
    experts, _, inputs = weight.shape
    try:
        placed = stack.to(device)
        exact = weight.to(device)
        with torch.inference_mode():
            for count in _TRIAL_TOKENS:
                scores = torch.rand(count, experts, generator=generator)
                chosen = scores.topk(min(_CHOSEN, experts)).indices.to(device)
                pairs = chosen.reshape(-1)
                for each in (count, len(pairs)):
                    x = torch.randn(each, inputs, generator=generator) * torch.randn(inputs, generator=generator).exp()
                    rows = x.to(device, dtype)
                    got = placed.product(rows, route(chosen, experts)).float()
                    meant = _rounded(rows) if isinstance(stack, Fp8Experts) else rows.float()
                    meant = meant.repeat_interleave(len(pairs) // each, 0)
                    want = torch.stack([exact[expert] @ row for expert, row in zip(pairs.tolist(), meant, strict=True)])
                    error = float(((got - want).abs().amax(1) / want.abs().amax(1)).max())
                    if not error <= TOLERANCE:
                        return f"products of {count} tokens with experts are wrong by {error:.2g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a Triton, a compiler or a card without it
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _rounded(rows: Tensor) -> Tensor:
    """Return rows as they are in FP8, f32. That rounding is right is for fp8_blocks.unsupported to say."""
    codes, scales = rounded_groups(rows)
    return codes.float() * scales.repeat_interleave(SIDE, 1)[:, : rows.shape[1]]


def slower(
    stack: Callable[[int], ExpertStack], outputs: int, inputs: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Say that products of experts, which are made, take longer than torch's with decoded ones; empty if not."""

    def calls() -> timing.Calls:
        made = stack(_TIMED_EXPERTS)
        plain = torch.randn(_TIMED_EXPERTS, outputs, inputs, device=device, dtype=dtype)

        def of(count: int) -> tuple[timing.Call, timing.Call]:
            x = torch.randn(count, inputs, device=device, dtype=dtype)
            chosen = torch.rand(count, _TIMED_EXPERTS, device=device).topk(_TIMED_CHOSEN).indices
            return (
                lambda: made.product(x, route(chosen, _TIMED_EXPERTS)),
                lambda: _decoded_product(x, plain, chosen),
            )

        return of

    return timing.slower_calls(calls, _TIMED_TOKENS)


def _decoded_product(x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Multiply as transformers does with a grouped product."""
    sorted_ids, order = chosen.reshape(-1).sort()
    counts = torch.histc(sorted_ids.float(), bins=len(weight), min=0, max=len(weight) - 1)
    ends = counts.cumsum(0).to(torch.int32)
    return functional.grouped_mm(x[order // chosen.shape[1]], weight.transpose(1, 2), offs=ends)
