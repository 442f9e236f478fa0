"""The compiled layers of an encoder give the states that transformers' modules give for each text by itself."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from model_worker.cpu.encoder import shares
from model_worker.cpu.encoder.attention import Nearness, attend, scratch_for
from model_worker.cpu.encoder.layers import EncoderLayers
from model_worker.cpu.encoder.pattern import require_form
from model_worker.cpu.encoder.phases import BLOCK_TOKENS
from model_worker.cpu.gemm.packed_linear import pack_linears, quantize_linears
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.activations import gelu, gelu_tanh
from model_worker.cpu.simd.dot_bf16 import TILE_ROWS, operand_dtype
from model_worker.decoder_form import UnsupportedPattern
from model_worker.pooling.smoothing import scale_inputs, smooth

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=6)


def bert(seed: int, hidden: int, heads: int, act: str = "gelu", dtype: torch.dtype = torch.float32) -> Any:
    config = BertConfig(
        vocab_size=90,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 10,
        num_hidden_layers=2,
        num_attention_heads=heads,
        max_position_embeddings=160,
        hidden_act=act,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    made: Any = BertModel(config, add_pooling_layer=False)
    model = made.eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and norms, which begin as zeros and ones
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def texts_of(seed: int, lengths: list[int]) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(1, 90, length)) for length in lengths]


def alone(model: Any, texts: list[Tensor]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(input_ids=text[None]).last_hidden_state[0] for text in texts]).float()


def together(model: Any, layers: EncoderLayers, texts: list[Tensor]) -> Tensor:
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        x = model.embeddings(input_ids=torch.cat(texts)[None], position_ids=positions[None])[0].float()
        return layers.run(x, [0, *np.cumsum(lengths).tolist()])


def worst(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


@settings(max_examples=12, deadline=None)
@given(
    SEEDS,
    LENGTHS,
    st.sampled_from([(48, 4), (64, 2), (128, 2), (256, 2), (130, 13)]),
    st.booleans(),
    st.sampled_from([0.0, shares.SMALL_PASS]),
    st.sampled_from([8, shares.SHARE_TOKENS]),
)
def test_texts_together_get_the_states_of_texts_alone(
    seed: int, lengths: list[int], shape: tuple[int, int], tanh: bool, small: float, share: int
) -> None:
    """Also of so many tokens that cores take them in blocks, of heads wider than a panel, by one core, by all of them
    together and in shares."""
    with patch.object(shares, "SMALL_PASS", small), patch.object(shares, "SHARE_TOKENS", share):
        check_together(seed, lengths, shape, tanh)


def check_together(seed: int, lengths: list[int], shape: tuple[int, int], tanh: bool) -> None:
    model = bert(seed % 2**31, *shape, "gelu_new" if tanh else "gelu")
    texts = texts_of(seed, lengths)
    want = alone(model, texts)
    pack_linears(model)
    layers = EncoderLayers(model)
    assert worst(together(model, layers, texts), want) < 1e-4
    few = texts_of(seed + 1, [1, 3])
    assert worst(together(model, layers, few), alone(model, few)) < 1e-4


# Each kind of weights has layers of its own to compile.
@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[7], [BLOCK_TOKENS * torch.get_num_threads() // 2 + 1] * 3])
def test_bfloat16_and_int8_weights_keep_the_states(lengths: list[int]) -> None:
    lengths = [min(length, 150) for length in lengths]
    texts = texts_of(5, lengths)
    for dtype, int8, least in ((torch.bfloat16, False, 0.999), (torch.float32, True, 0.999)):
        model = bert(5, 64, 2, dtype=dtype)
        exact = bert(5, 64, 2)
        quantized = quantize_linears(model) if int8 else None
        want = alone(model if int8 else exact, texts)
        pack_linears(model, quantized=quantized)
        got = together(model, EncoderLayers(model), texts)
        assert torch.cosine_similarity(got, want).min() > least


@pytest.mark.parametrize("small", [0.0, shares.SMALL_PASS])
def test_a_text_gets_the_same_bits_beside_others_as_alone(small: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SMALL_PASS", small)
    monkeypatch.setattr(shares, "SHARE_TOKENS", 8)
    model = bert(3, 64, 2)
    pack_linears(model)
    layers = EncoderLayers(model)
    texts = texts_of(3, [20, 5, 40])
    separate = torch.cat([together(model, layers, [text]) for text in texts])
    assert worst(together(model, layers, texts), separate) < 1e-6


def test_scaled_inputs_change_nothing_about_the_states() -> None:
    """As smoothing leaves a model: each weight divided by what its inputs are multiplied by."""
    model = bert(4, 64, 2)
    texts = texts_of(4, [5, 70, 140])
    want = alone(model, texts)
    with torch.inference_mode():
        scales = smooth(model, lambda: alone(model, texts))
        pack_linears(model)
        scale_inputs(model, scales)
    assert worst(alone(model, texts), want) < 1e-4
    assert worst(together(model, EncoderLayers(model), texts), want) < 1e-4


def test_other_models_are_refused_with_a_reason() -> None:
    with pytest.raises(UnsupportedPattern, match="parts are not those of BERT"):
        require_form(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(UnsupportedPattern, match="activation is not GELU"):
        require_form(bert(0, 48, 4, act="relu"))
    with pytest.raises(UnsupportedPattern, match="not packed"):
        EncoderLayers(bert(0, 48, 4))


@njit
def _gelus(values: Any, exact: Any, approximate: Any) -> None:
    for i in range(len(values)):
        exact[i] = gelu(values[i])
        approximate[i] = gelu_tanh(values[i])


def test_gelu_is_that_of_torch() -> None:
    values = np.concatenate([np.linspace(-12, 12, 20_001), [-1e30, -100, 0, 100, 1e30]]).astype(np.float32)
    exact, approximate = np.empty_like(values), np.empty_like(values)
    _gelus(values, exact, approximate)
    wide = torch.from_numpy(values).double()
    for got, how in ((exact, "none"), (approximate, "tanh")):
        want = torch.nn.functional.gelu(wide, approximate=how).numpy()
        assert (np.abs(got - want) <= 3e-7 * np.maximum(1, np.abs(want))).all()


@njit(nogil=True)
def _attend(
    qkv: Any, bounds: Any, seen: Any, heads: int, longest: int, scale: Any, scales: Any, near: Any, like: Any, out: Any
) -> None:
    scratch = scratch_for(longest, qkv.shape[1] // 3 // heads, like)
    tile = np.empty((TILE_ROWS, PANEL), np.float32)
    taken = (np.int64(0), np.int64(heads * (len(bounds) - 1)))
    attend(taken, qkv, bounds, seen, heads, scale, scales, near, out, scratch, tile)


def turned(x: NDArray[np.float64], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[np.float64]:
    """[places, heads, head_dim] as transformers rotates halves."""
    low, high = np.split(x, 2, axis=2)
    return np.concatenate(
        [
            low * cos[: len(x), None] - high * sin[: len(x), None],
            high * cos[: len(x), None] + low * sin[: len(x), None],
        ],
        axis=2,
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=SEEDS,
    lengths=LENGTHS,
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 70).map(lambda half: 2 * half) | st.integers(1, 140),
    window=st.just(0) | st.integers(1, 160),
    turns=st.booleans(),
    biased=st.booleans(),
    coarse=st.booleans(),
)
def test_attention_is_the_naive_one(
    seed: int, lengths: list[int], heads: int, head_dim: int, window: int, turns: bool, biased: bool, coarse: bool
) -> None:
    """With windows, turned queries and keys, and a bias for each distance; `coarse` has operands of bfloat16."""
    rng = np.random.default_rng(seed)
    width = heads * head_dim
    places = max(lengths) + 3
    angles = rng.uniform(-3, 3, (places if turns and head_dim % 2 == 0 else 0, head_dim // 2)).astype(np.float32)
    biases = rng.standard_normal((heads, 2 * places - 1) if biased else (0, 0)).astype(np.float32)
    near = Nearness(window, np.cos(angles), np.sin(angles), biases * np.float32(head_dim**0.5))
    qkv = (2 * rng.standard_normal((sum(lengths), 3 * width))).astype(np.float32)
    bounds = np.array([0, *np.cumsum(lengths)])
    out = np.full((len(qkv), width), np.nan, np.float32)
    scales = rng.uniform(0.5, 2, width).astype(np.float32)
    like = np.empty(1, operand_dtype(np.uint16 if coarse else np.float32))
    # With a window, a token far from those that are seen sees none.
    seen = np.array([rng.integers(1, length + 1) for length in lengths])
    _attend(qkv, bounds, seen, heads, max(lengths), np.float32(head_dim**-0.5), scales, near, like, out)
    for (first, end), keys in zip(itertools.pairwise(bounds), seen, strict=True):
        length = end - first
        q, k, v = np.split(qkv[first:end].astype(np.float64).reshape(length, 3 * heads, head_dim), 3, axis=1)
        if len(angles):
            q, k = (turned(each, near.cos, near.sin) for each in (q, k))
        scores = np.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
        distance = np.arange(length) - np.arange(length)[:, None]
        if biased:
            scores += biases[:, distance + places - 1]
        if window:
            scores[:, np.abs(distance) >= window] = -np.inf
        scores[..., keys:] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
        totals = weights.sum(-1, keepdims=True)
        weights /= np.where(totals == 0, 1, totals)
        want = np.einsum("hqk,khd->qhd", weights, v).reshape(length, width) * scales
        error = np.abs(out[first:end] - want)
        # A wrong weight is off by whole numbers; rounding of bfloat16 takes a 256th from terms of scores.
        largest = 2.0 if like.dtype == np.uint16 else 1e-3
        assert error.max() < largest
        assert error.mean() < largest / 20


def test_a_token_whose_window_holds_no_key_attends_to_nothing() -> None:
    """Four keys and a window of three: the seventh token and those behind it see none, as for torch."""
    tokens, keys, window, heads, head_dim = 11, 4, 3, 2, 8
    qkv = torch.randn(tokens, 3, heads, head_dim, generator=torch.Generator().manual_seed(0))
    places = torch.arange(tokens)
    visible = ((places[:, None] - places).abs() < window) & (places < keys)
    q, k, v = qkv.permute(1, 2, 0, 3)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1).flatten(1)
    assert not want[keys + window - 1 :].any()
    nothing = np.empty((0, 0), np.float32)
    out = np.full((tokens, heads * head_dim), np.nan, np.float32)
    near = Nearness(window, nothing, nothing, nothing)
    scales = np.ones(heads * head_dim, np.float32)
    like = np.empty(1, np.float32)
    bounds = np.array([0, tokens])
    scale = np.float32(head_dim**-0.5)
    _attend(qkv.flatten(1).numpy(), bounds, np.array([keys]), heads, tokens, scale, scales, near, like, out)
    np.testing.assert_allclose(out, want.numpy(), atol=1e-5)
