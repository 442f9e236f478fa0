"""The compiled layers of a recogniser's encoder give the states of transformers' modules, for windows of 30 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig
from transformers import WhisperForConditionalGeneration as Whisper

from model_worker.cpu.encoder.phases import BLOCK_TOKENS
from model_worker.cpu.gemm.packed_linear import pack_linears
from model_worker.hearing.compiled import CompiledLayer, compiled_layers, probed
from model_worker.hearing.encoder import clip_encoder
from model_worker.loading import verify

HEAD = 64


def recogniser(heads: int, positions: int, dtype: torch.dtype) -> Any:
    """A recogniser of random weights, also of norms and biases, which begin as ones and zeros."""
    config = WhisperConfig(
        vocab_size=60,
        num_mel_bins=8,
        d_model=HEAD * heads,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=HEAD * heads + 70,
        decoder_ffn_dim=32,
        max_source_positions=positions,
        max_target_positions=8,
        pad_token_id=1,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
        init_std=0.15,
    )
    model: Any = Whisper(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval().to(dtype)


def errors(heads: int, positions: int, dtype: torch.dtype, cores: int) -> Tensor:
    """The relative error of each position's states, against the modules in float32."""
    model = recogniser(heads, positions, dtype)
    exact = recogniser(heads, positions, torch.float32)
    exact.load_state_dict(model.state_dict())
    clip = torch.randn(8, 2 * positions)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(max(2, before))
        pack_linears(model)
        plain = clip_encoder(model, dtype, torch.device("cpu"))
        encoder = replace(plain, compiled=compiled_layers(model.model.encoder))
        torch.set_num_threads(cores)
        with torch.inference_mode():
            want = exact.model.encoder(clip[None]).last_hidden_state[0]
            got = encoder._states(clip.to(dtype))
        assert got.shape == want.shape
        found: Tensor = (got - want).norm(dim=-1) / want.norm(dim=-1)
        return found
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("heads", "positions", "cores"), [(2, 1500, 2), (3, 1500, 1), (1, 70, 2)])
def test_states_are_those_of_the_modules(heads: int, positions: int, cores: int) -> None:
    assert errors(heads, positions, torch.float32, cores).max() < 1e-4


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_wrong_position_in_the_last_block_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recogniser(2, 1500, torch.float32)
    pack_linears(model)
    encoder = model.model.encoder
    layers = compiled_layers(encoder)
    tolerance = verify.TOLERANCE[torch.float32]
    got, want = probed(encoder, layers)
    assert len(got) > BLOCK_TOKENS * torch.get_num_threads()
    assert verify.largest_error(got, want) < tolerance
    forward = CompiledLayer.forward

    def defective(layer: CompiledLayer, states: Tensor) -> Tensor:
        forward(layer, states)
        if layer is layers[-1]:
            states[-1] *= 1.1
        return states

    monkeypatch.setattr(CompiledLayer, "forward", defective)
    got, want = probed(encoder, layers)
    assert verify.median_error(got, want) < tolerance < verify.largest_error(got, want)


# bfloat16 has kernels of its own to compile.
@pytest.mark.slow
def test_in_bfloat16_states_are_near_those_of_float32() -> None:
    found = errors(2, 1500, torch.bfloat16, 2)
    assert found.median() < 0.02
    assert found.max() < 0.1
