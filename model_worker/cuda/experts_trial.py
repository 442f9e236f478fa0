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
# Tokens of the trials whose time is taken.
_TIMED_TOKENS = (1, 16, 64)


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
        # As large as what they are added to.
        size = float(weight.square().mean().sqrt()) * inputs**0.5
        biases = (torch.randn(weight.shape[:2], generator=generator) * size).to(device, dtype)
        with torch.inference_mode():
            for count in _TRIAL_TOKENS:
                scores = torch.rand(count, experts, generator=generator)
                chosen = scores.topk(min(_CHOSEN, experts)).indices.to(device)
                pairs = chosen.reshape(-1)
                for each, bias in ((count, None), (len(pairs), biases)):
                    x = torch.randn(each, inputs, generator=generator) * torch.randn(inputs, generator=generator).exp()
                    rows = x.to(device, dtype)
                    got = placed.product(rows, route(chosen, experts), bias).float()
                    meant = _rounded(rows) if isinstance(stack, Fp8Experts) else rows.float()
                    meant = meant.repeat_interleave(len(pairs) // each, 0)
                    want = torch.stack([exact[expert] @ row for expert, row in zip(pairs.tolist(), meant, strict=True)])
                    want = want if bias is None else want + bias[pairs].float()
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


def slower(make: Callable[[], ExpertStack], chosen: int, device: torch.device, dtype: torch.dtype) -> str:
    """Say that products of experts, which are made, take longer than torch's with decoded ones, where a token has so
    many `chosen` experts; empty if not. Both know where each pair goes."""

    def calls() -> timing.Calls:
        made = make()
        experts, outputs, inputs = made.experts, made.outputs, made.inputs
        plain = torch.randn(experts, outputs, inputs, device=device, dtype=dtype)

        def of(count: int) -> tuple[timing.Call, timing.Call]:
            x = torch.randn(count, inputs, device=device, dtype=dtype)
            ids = torch.rand(count, experts, device=device).topk(min(chosen, experts)).indices
            routing = route(ids, experts)
            tokens = routing.pairs // ids.shape[1]
            ends = ids.reshape(-1).bincount(minlength=experts).cumsum(0).to(torch.int32)
            return (
                lambda: made.product(x, routing),
                # As transformers multiplies with a grouped product.
                lambda: functional.grouped_mm(x[tokens], plain.transpose(1, 2), offs=ends),
            )

        return of

    return timing.slower_calls(calls, _TIMED_TOKENS)
