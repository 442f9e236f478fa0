"""How a batch is put to torch's variable-length attention, whose meaning is written out here, as no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_worker.attention import cuda, reference
from model_worker.kv_cache import AttentionParams, KVLayout, LayerShape
from model_worker.loading import verify
from model_worker.loading.gpu_attention import choose_attention
from model_worker.loading.load import load_model
from model_worker.model import ModelRefused
from tests.model_worker.test_attention import Case, relative_error
from tests.model_worker.tiny_models import tiny_model


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as its documentation and its kernel's checks have it."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == block_table.stride(-1) == 1
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert cu_seq_q.is_contiguous()
    assert cu_seq_k.is_contiguous()
    assert seqused_k.is_contiguous()
    assert len(cu_seq_q) == len(cu_seq_k) == len(seqused_k) + 1 == len(block_table) + 1
    assert key.shape == value.shape
    assert key.shape[1] % 256 == 0
    assert key.shape[3] % 8 == 0
    assert enable_gqa
    assert num_splits == 1
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    assert cu_seq_k.diff().tolist() == seqused_k.tolist()
    group, parts = query.shape[1] // key.shape[2], []
    before, after = (int(side) if side >= 0 else 1 << 40 for side in window_size)
    for i, (start, stop) in enumerate(zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)):
        count, length = stop - start, int(seqused_k[i])
        pages = block_table[i, : -(-length // key.shape[1])].tolist()
        k, v = (torch.cat([kv[p] for p in pages])[:length].float().repeat_interleave(group, 1) for kv in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), k) * scale
        at = torch.arange(count)[:, None] + length - count  # aligned to the end
        keys = torch.arange(length)[None]
        scores = scores.masked_fill((keys < at - before) | (keys > at + after), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype))
    return torch.cat(parts)


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases)
def test_a_batch_means_the_same_to_the_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", written_out)
    q, cache, batch, params = case.tensors()
    want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
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
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", written_out)
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
    monkeypatch.undo()
    assert choose_attention(loaded, tokens, expected).attention_name == "reference", "a CPU has no such kernel"
