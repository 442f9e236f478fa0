"""Tokens that a kernel rounds to FP8, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.model_worker.cuda.interpreter import need_triton

need_triton()

from model_worker.cuda.fp8_kernel import round_tokens  # noqa: E402

LARGEST = 448.0
LEAST = 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 1024, 1500])
def test_tokens_that_need_no_rounding_are_kept(width: int, dtype: torch.dtype) -> None:
    """The interpreter rounds in its own way, and other numbers are not compared."""
    numbers = (torch.randn(4, width) * 60).to(torch.float8_e4m3fn)
    numbers.view(torch.uint8)[:, 3] = 0x7E  # the largest
    scales = torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None]
    rows = (numbers.float() * scales).to(dtype)
    codes, found = round_tokens(rows, LARGEST, LEAST)
    assert torch.equal(found, scales)
    assert torch.equal(codes.float(), numbers.float())


def test_a_token_of_zeros_has_a_scale_and_one_that_is_not_finite_has_none() -> None:
    rows = torch.randn(5, 40)
    rows[1] = 0
    rows[2, 7] = torch.nan
    rows[3, 9] = -torch.inf
    codes, scales = round_tokens(rows, LARGEST, LEAST)
    assert not codes[1].float().any()
    assert float(scales[1]) == pytest.approx(LEAST)
    assert scales[2:4].isnan().all()
    want = rows[[0, 4]].abs().amax(-1, keepdim=True) / LARGEST
    torch.testing.assert_close(scales[[0, 4]], want)
