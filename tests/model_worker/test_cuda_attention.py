"""How a batch is put to torch's variable-length attention, with a stand-in below it, as no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_worker.attention import cuda, reference
from model_worker.kv_cache import AttentionParams, KVLayout, LayerShape
from model_worker.loading import verify
from model_worker.loading.gpu_attention import choose_attention
from model_worker.loading.load import load_model
from model_worker.model import ModelRefused
from tests.model_worker.cuda.flash_attention import flash_attention
from tests.model_worker.test_attention import Case, relative_error
from tests.model_worker.tiny_models import tiny_model

decode_or_chunk = st.tuples(st.just(1) | st.integers(1, 30), st.integers(0, 600))
cases = st.builds(
    Case,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    k_dim=st.just(24),
    v_dim=st.just(24),
    block_size=st.sampled_from([256, 512]),
    lens=st.lists(decode_or_chunk, min_size=1, max_size=4).map(tuple)
    | st.lists(st.integers(0, 600).map(lambda past: (1, past)), min_size=1, max_size=4).map(tuple),
    window=st.none() | st.integers(1, 300),
    softcap=st.none(),
    sinks=st.just(False),
    seed=st.integers(0, 1 << 30),
    dtype=st.just(torch.bfloat16),
)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_a_batch_means_the_same_to_the_kernel(case: Case) -> None:
    q, cache, batch, params = case.tensors()
    want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
    with flash_attention():
        got = cuda.attend(q, cache.k[0], cache.v[0], batch, params)
    assert got.dtype == q.dtype
    assert relative_error(got, want) < 1e-2


def test_what_the_kernel_cannot_do_is_named() -> None:
    def why(layer: LayerShape, dtype: torch.dtype = torch.bfloat16, **values: Any) -> str | None:
        return cuda.unsupported_layers(
            KVLayout((LayerShape(1, 64, 64), layer), dtype), [AttentionParams(1.0, **values)]
        )

    usual = LayerShape(2, 128, 128)
    assert why(usual) is None
    assert why(usual, torch.float16, sliding_window=7) is None
    assert "float32" in str(why(usual, torch.float32))
    assert "keys have 192 elements and its values 128" in str(why(LayerShape(2, 192, 128)))
    assert "heads have 20" in str(why(LayerShape(2, 20, 20)))
    assert "heads have 264" in str(why(LayerShape(2, 264, 264)))
    assert "soft cap" in str(why(usual, softcap=30.0))
    assert "sinks" in str(why(usual, sinks=torch.zeros(2)))


def test_a_torch_whose_function_reads_no_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11's."""
    assert cuda.unsupported_version() is None

    def varlen_attn(query: Tensor, key: Tensor, *, scale: float, window_size: tuple[int, int]) -> Tensor:
        raise NotImplementedError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert "varlen_attn has no block_table, enable_gqa, num_splits, seqused_k" in str(cuda.unsupported_version())
    monkeypatch.delattr("torch.nn.attention.varlen.varlen_attn")
    assert "no attention for sequences of any length" in str(cuda.unsupported_version())


def test_a_kernel_that_fails_its_proof_is_not_used(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path: Path = tiny_model("olmo2", tmp_path_factory.getbasetemp(), hidden_size=64)
    loaded = load_model(path, "bfloat16", "cpu", lambda *_: None)
    assert loaded.block_size == 16
    monkeypatch.setattr(cuda, "unsupported", lambda *_: None)
    tokens = verify.tokens(loaded.model.config, loaded.device)
    expected = torch.randn(2, tokens.shape[1], loaded.vocab_size)
    with flash_attention():
        assert choose_attention(loaded, tokens, expected).attention_name == "reference"
        assert "attends in plain torch" in caplog.text
        assert "gives other logits" in caplog.text
        with torch.inference_mode():
            expected = verify.eager_logits(loaded.model, tokens)
        served = choose_attention(loaded, tokens, expected)
        assert (served.attention_name, served.block_size) == ("cuda", 256)
        asked: list[bool] = []

        def no_other(here: bool) -> bool:
            asked.append(here)
            return False

        on_another_rank = choose_attention(loaded, tokens, expected, agreed=no_other)
        assert (on_another_rank.attention_name, asked) == ("reference", [False, True])
        assert "cuda: it fails on another rank" in caplog.text
        with monkeypatch.context() as broken:
            # No other rank would leave out the pass that fails here.
            broken.setattr(verify, "check_paged", lambda *_: 1 / 0)
            with pytest.raises(ModelRefused, match="a pass with the cuda attention fails on one rank"):
                choose_attention(loaded, tokens, expected, agreed=bool)
    assert choose_attention(loaded, tokens, expected).attention_name == "reference", "a CPU has no such kernel"
