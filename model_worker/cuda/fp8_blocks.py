"""Linear layers on a GPU whose weights stay in FP8 with a scale for each block of 128 outputs and 128 inputs.

Inputs are rounded to FP8 in groups of 128, as DeepSeek's checkpoints mean it. The kernels are in fp8_block_kernel.py.
Knows no format of files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_worker.cuda import timing
from model_worker.cuda.fp8_linear import LARGEST, LEAST_SCALE, TOLERANCE, lacks_fp8

# Outputs, and inputs, of a block.
SIDE = 128
# Sizes of the trial that is compared: no multiples of blocks nor of tiles. Its groups of inputs are many more than
# those that are on their way at a time.
_TRIAL_TOKENS = (1, 17, 600)
_TRIAL_OUTPUTS = 208
_TRIAL_INPUTS = SIDE * 17 + 16
# What rounding to e4m3 changes at most: this part of a number, or of a scale where the number is next to nothing.
_ROUNDED = 1 / 16
_ROUNDED_OF_SCALE = 1 / 1024
# Tokens of the trials whose time is taken: steps of few answers and of many, and one with a prompt.
_TIMED_TOKENS = (16, 32, 128, 1024)


class BlockFp8Linear(nn.Module):
    """A linear layer with `codes` e4m3 [out, in] and `scales` f32 [blocks of out, blocks of in]. Outputs have the
    dtype of inputs."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """`values` are e4m3 [out, in], with a scale for each block of SIDE by SIDE, those at the ends being smaller."""
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.codes = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales.contiguous(), requires_grad=False)
        self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Return a new copy of the decoded weight, f32[out, in]."""
        along = self.scales.repeat_interleave(SIDE, 0)[: self.out_features]
        return self.codes.float() * along.repeat_interleave(SIDE, 1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        return block_product(x, self.codes, self.scales, self.bias)


def block_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `x` [..., in] by a weight e4m3 [out, in] with scales f32[blocks of out, blocks of in]; add a bias."""
    from model_worker.cuda.fp8_block_kernel import multiply_blocks

    rounded, of_groups = rounded_groups(x.reshape(-1, x.shape[-1]))
    out = multiply_blocks(rounded, of_groups, codes, scales, bias, x.dtype)
    return out.reshape(*x.shape[:-1], len(codes))


def rounded_groups(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [T, in] as e4m3, and the scales of their groups, f32[T, groups]; NaN for one that is not finite."""
    if rows.device.type != "cpu":
        from model_worker.cuda.fp8_block_kernel import round_groups

        return round_groups(rows.contiguous(), LARGEST, LEAST_SCALE)
    width = rows.shape[1]
    parts = functional.pad(rows.float(), (0, -width % SIDE)).unflatten(1, (-1, SIDE))
    scales = (parts.abs().amax(-1) / LARGEST).clamp_min(LEAST_SCALE)
    # A value that rounds beyond the largest number would be NaN.
    inside = (parts / scales[..., None]).clamp(-LARGEST, LARGEST)
    return inside.to(torch.float8_e4m3fn).flatten(1)[:, :width].contiguous(), scales


def unsupported(device: torch.device) -> str:
    """Say why a device does not round and multiply such numbers as it should; empty if it does."""
    if reason := lacks_fp8(device):
        return reason
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    codes = (drawn(_TRIAL_OUTPUTS, _TRIAL_INPUTS) * 100).to(torch.float8_e4m3fn)
    scales = drawn(-(-_TRIAL_OUTPUTS // SIDE), -(-_TRIAL_INPUTS // SIDE)).exp() / 100
    biased, plain = (BlockFp8Linear(codes, scales, bias) for bias in (drawn(_TRIAL_OUTPUTS).bfloat16(), None))
    try:
        with torch.inference_mode():
            for count in _TRIAL_TOKENS:
                # Groups of unlike sizes, so that a scale in the wrong place shows.
                x = drawn(count, _TRIAL_INPUTS) * drawn(count, 1).exp() * drawn(_TRIAL_INPUTS).exp()
                for linear in (biased, plain):
                    if reason := _differs(linear, x.bfloat16(), device):
                        return reason
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a Triton, a compiler or a card without it
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _differs(linear: BlockFp8Linear, x: Tensor, device: torch.device) -> str:
    """Say what of a product of `x` [T, in] on a device is not what it is in float32; empty if all is."""
    placed = x.to(device)
    rounded, scales = (part.cpu() for part in rounded_groups(placed))
    along = scales.repeat_interleave(SIDE, 1)[:, : x.shape[1]]
    values = rounded.float() * along
    most = torch.maximum(x.float().abs() * _ROUNDED, along * _ROUNDED_OF_SCALE)
    if not bool(((values - x.float()).abs() <= 1.01 * most).all()):
        return "its FP8 numbers are not those of the inputs"
    bias = linear.bias
    want = functional.linear(values, linear.weight, None if bias is None else bias.float())
    added = None if bias is None else bias.to(device)
    got = block_product(placed, linear.codes.to(device), linear.scales.to(device), added).float().cpu()
    error = float(((got - want).abs().amax(1) / want.abs().amax(1)).max())
    return "" if error <= TOLERANCE else f"its products of FP8 numbers in blocks are wrong by {error:.2g}"


def slower(device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> str:
    """Say that products with weights of this shape take longer than with decoded ones, on a GPU; empty if not.

    Where they cannot be timed, it says that.
    """
    shape = outputs, inputs
    return timing.slower(lambda: random_linear(*shape, device), shape, dtype, device, _TIMED_TOKENS)


def random_linear(outputs: int, inputs: int, device: torch.device) -> BlockFp8Linear:
    """Return a layer of random numbers on a device."""
    codes = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return BlockFp8Linear(codes, torch.ones(-(-outputs // SIDE), -(-inputs // SIDE), device=device), None)
