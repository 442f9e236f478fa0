"""Embeddings find the rows of tables that are in codes, and a table that is a head's weight, too, is there once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from model_worker.cpu.gemm.coded_linear import CodedLinear, WordLinear
from model_worker.cpu.gemm.coded_rows import fill_row
from model_worker.cpu.gemm.embedding import CodedEmbedding, EncodedEmbedding, decode_all, has_table, keep_encoded
from model_worker.cpu.gemm.encoded_linear import EncodedLinear, EncodedWeight
from model_worker.cpu.gemm.packed_linear import pack_linears, quantize_linears
from shared.weight_codes import Codes
from tests.model_worker.cpu.coded_weights import KINDS, coded, some

TOKENS = 200
WIDTH = 256


@njit(nogil=True)
def filled(panels: int, numbers: Any, rows: Any) -> None:
    for i in range(len(numbers)):
        fill_row(panels, numbers[i], rows[i])


def rows_of(linear: CodedLinear) -> NDArray[np.float32]:
    """Every row, as compiled code finds it."""
    rows = np.full((linear.out_features, linear.in_features), np.nan, np.float32)
    filled(linear.panels.ctypes.data, np.arange(len(rows)), rows)
    return rows


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_compiled_rows_are_those_of_the_dequantised_weight(kind: str) -> None:
    rng = np.random.default_rng()
    outputs = int(rng.integers(1, 300))
    codes = KINDS[kind](rng, outputs, 256 * int(rng.integers(1, 4)))
    assert np.array_equal(rows_of(coded(codes)), codes.weight)


def test_compiled_rows_of_bfloat16() -> None:
    weight = torch.randn(150, 96).bfloat16()
    assert np.array_equal(rows_of(WordLinear(weight, None, torch.bfloat16)), weight.float().numpy())


class Kept(EncodedWeight):
    """A weight in codes, as a format gives it."""

    def __init__(self, codes: Codes, has_codes: bool = True) -> None:
        self._codes = codes
        self._has_codes = has_codes
        self.shape = codes.codes.shape

    def rows(self, first: int, last: int) -> Tensor:
        return torch.from_numpy(some(self._codes, first, last).weight)

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        return (lambda first, last: some(self._codes, first, last)) if self._has_codes else None


# The square root of 3,072, which bfloat16 rounds to 55.5.
SCALE = 55.42562584220407


class Unrounded(nn.Embedding):
    """Its scale is a tensor that is used as it is."""

    def __init__(self) -> None:
        super().__init__(TOKENS, WIDTH, padding_idx=TOKENS - 1)
        self.embed_scale = torch.tensor(SCALE)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale


Unrounded.__name__ = "SomeScaledWordEmbedding"
# Whose scale is a number, a buffer that is rounded, and a tensor that is not.
SCALED: list[Callable[[], nn.Embedding]] = [
    lambda: BartScaledWordEmbedding(TOKENS, WIDTH, TOKENS - 1, SCALE),
    lambda: Gemma3TextScaledWordEmbedding(TOKENS, WIDTH, TOKENS - 1, SCALE),
    Unrounded,
]


class Model(nn.Module):
    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embedding = embedding
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = embedding.weight
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)


def table(kind: str = "Q4_K", **options: bool) -> Kept:
    return Kept(KINDS[kind](np.random.default_rng(), TOKENS, WIDTH), **options)


@pytest.mark.parametrize("make", [lambda: nn.Embedding(TOKENS, WIDTH), *SCALED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_decoded_as_they_are_looked_up(make: Callable[[], nn.Embedding], dtype: torch.dtype) -> None:
    plain = make()
    source = table()
    model = Model(make(), dtype)
    keep_encoded(model, "embedding", source, dtype)
    plain.weight = nn.Parameter(source.decoded(dtype), requires_grad=False)
    tokens = torch.randint(0, TOKENS, (2, 9))
    with torch.inference_mode():
        assert isinstance(model.embedding, EncodedEmbedding)
        assert torch.equal(model.embedding(tokens), plain(tokens))
        pack_linears(model)
        assert isinstance(model.embedding, CodedEmbedding) == (dtype == torch.bfloat16)
        assert torch.equal(model.embedding(tokens), plain(tokens))
        assert torch.equal(model.embedding(tokens[0]), plain(tokens[0]))
    assert torch.equal(model.embedding.weight, source.rows(0, TOKENS))


@pytest.mark.parametrize("make", SCALED)
def test_a_tied_table_is_scaled_as_before(make: Callable[[], nn.Embedding]) -> None:
    """A plain table becomes panels of words where other weights are in codes."""
    model = Model(make())
    keep_encoded(model, "inner", Kept(KINDS["Q8_0"](np.random.default_rng(), WIDTH, WIDTH)), torch.bfloat16)
    tokens = torch.randint(0, TOKENS, (3,))
    with torch.inference_mode():
        want = model.embedding(tokens)
        pack_linears(model)
        assert isinstance(model.embedding, CodedEmbedding)
        assert torch.equal(model.embedding(tokens), want)


def test_an_embedding_with_more_than_a_table_stays_as_it_is() -> None:
    embedding = SCALED[0]()
    assert has_table(embedding)
    embedding.of_images = nn.Parameter(torch.zeros(WIDTH))
    assert not has_table(embedding)


def test_a_tied_table_is_the_heads_panels() -> None:
    model = Model(nn.Embedding(TOKENS, WIDTH))
    source = table("Q6_K")
    keep_encoded(model, "embedding", source, torch.bfloat16)
    keep_encoded(model, "head", source, torch.bfloat16)
    packed = pack_linears(model)
    embedding: Any = model.embedding
    assert embedding.linear is model.head
    assert len(packed) == 2
    assert not list(model.parameters())


def test_a_tied_table_of_bfloat16_is_not_kept_beside_a_head_among_codes() -> None:
    model = Model(nn.Embedding(TOKENS, WIDTH))
    weight = model.head.weight.detach().clone()
    keep_encoded(model, "inner", Kept(KINDS["Q8_0"](np.random.default_rng(), WIDTH, WIDTH)), torch.bfloat16)
    pack_linears(model)
    embedding: Any = model.embedding
    head: Any = model.head
    assert isinstance(head, WordLinear)
    assert embedding.linear is head
    assert torch.equal(embedding(torch.arange(TOKENS)), weight)
    assert not list(model.parameters())


@pytest.mark.parametrize("why", ["no codes", "int8", "no kernels"])
def test_a_table_is_decoded_where_codes_are_not_kept(why: str) -> None:
    model = Model(nn.Embedding(TOKENS, WIDTH))
    source = table("Q4_0", has_codes=why != "no codes")
    keep_encoded(model, "embedding", source, torch.bfloat16)
    keep_encoded(model, "head", source, torch.bfloat16)
    if why == "no kernels":
        decode_all(model)
        assert model.head.weight is model.embedding.weight
        assert not any(isinstance(module, EncodedLinear) for module in model.modules())
    else:
        pack_linears(model, None, quantize_linears(model) if why == "int8" else None)
    assert type(model.embedding) is nn.Embedding
    assert torch.equal(model.embedding.weight, source.decoded(torch.bfloat16))
