"""Linear layers on a GPU whose weights stay in FP8, and whose inputs are rounded to FP8 token by token.

The product is torch's `_scaled_mm`: both sides are of e4m3, and each output is scaled by its token's scale and by its
own. Knows no format of files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Compute capability of the first cards with products of FP8 (Ada).
_FIRST_CAPABILITY = (8, 9)
LARGEST = 448.0
# A token of zeros needs a scale, too.
LEAST_SCALE = 1e-12
# Both sides of the product are whole multiples of it.
MULTIPLE = 16
# Of the largest output, between a product of rounded numbers in FP8 and in float32: one rounding to bfloat16.
TOLERANCE = 1e-2


class Fp8Linear(nn.Module):
    """A linear layer with `codes` e4m3 [out, in] and `scales` f32 [1, out]. Outputs have the dtype of inputs."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """`values` are e4m3 [out, in], both multiples of MULTIPLE, with a scale for each output, f32[out]."""
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.codes = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales[None].contiguous(), requires_grad=False)
        self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Return a new copy of the decoded weight, f32[out, in]."""
        return self.codes.float() * self.scales.t()

    def forward(self, x: Tensor) -> Tensor:
        return fp8_product(x, self.codes, self.scales, self.bias)


def fp8_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `x` [..., in] by a weight e4m3 [out, in] with scales f32[1, out], and add a bias [out]."""
    rounded, of_rows = _rounded(x.reshape(-1, x.shape[-1]))
    out = torch._scaled_mm(rounded, codes.t(), scale_a=of_rows, scale_b=scales, out_dtype=torch.bfloat16).to(x.dtype)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], len(codes))


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as e4m3 and their scales f32[T, 1]. The scale of a row that is not finite is NaN."""
    if rows.device.type != "cpu":
        from model_worker.cuda.fp8_kernel import round_tokens

        return round_tokens(rows.contiguous(), LARGEST, LEAST_SCALE)
    scales = (rows.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(LEAST_SCALE)
    # A value that rounds beyond the largest number would be NaN.
    return (rows.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def lacks_fp8(device: torch.device) -> str:
    """Say that a card is of a kind without products of FP8 numbers; empty if it is not."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return f"the card's compute capability is below {'.'.join(map(str, _FIRST_CAPABILITY))}"
    return ""


def unsupported(device: torch.device) -> str:
    """Say why a device does not multiply FP8 numbers as it should; empty if it does."""
    if reason := lacks_fp8(device):
        return reason
    generator = torch.Generator().manual_seed(0)
    values, inputs = (torch.randn(shape, generator=generator) for shape in ((48, 64), (5, 64)))
    linear = Fp8Linear((values * 100).to(torch.float8_e4m3fn), torch.rand(48, generator=generator) / 100, None)
    weight = linear.weight
    linear.to(device)
    try:
        with torch.inference_mode():
            got = linear(inputs.to(device, torch.bfloat16)).float().cpu()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a torch, a compiler or a card without it
        return str(error).partition("\n")[0]
    scales = inputs.bfloat16().float().abs().amax(-1, keepdim=True) / LARGEST
    rounded = (inputs.bfloat16().float() / scales).to(torch.float8_e4m3fn).float() * scales
    want = rounded @ weight.t()
    error_found = float((got - want).abs().max() / want.abs().max())
    return "" if error_found <= TOLERANCE else f"its products of FP8 numbers are wrong by {error_found:.2g}"
