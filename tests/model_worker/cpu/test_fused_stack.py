"""The fused stack computes what the model's own modules compute, and is used for models of its form only."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.cpu.fused.phases import BLOCK_TOKENS
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.dot_bf16 import STEP_BYTES, TILE_ROWS, multiply_half_panel, multiply_panel, operand_dtype
from model_worker.cpu.threads import OVER, ThreadPool, arrived_last, begin, phase_of, take, wait
from model_worker.loading import verify
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import VOCAB, tiny_model

FUSED = ("llama", "qwen2", "qwen3", "mistral", "phi3")
OTHERS = ("gemma2", "granite", "ministral3", "smollm3", "olmo2", "mixtral", "gpt2")
MINISTRAL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def load(arch: str, dtype: str, folder: Path, quantization: str = "none", **overrides: Any) -> LoadedModel:
    extra = MINISTRAL if arch in ("ministral3", "smollm3") else {}
    if arch in ("phi3", "qwen2", "mistral"):  # heads of whole vectors, joined projections of whole panels
        extra = {"hidden_size": 64}
    path = tiny_model(arch, folder, **{**extra, **overrides})
    return load_model(path, dtype, "cpu", lambda *_: None, quantization=quantization)


def batches(rng: np.random.Generator, block_size: int, num_blocks: int) -> list[ForwardBatch]:
    """A few steps of sequences that grow by random chunks, in random order, over shuffled blocks."""
    sequences = int(rng.integers(1, 9))
    tables = rng.permutation(num_blocks)[: sequences * (num_blocks // sequences)].reshape(sequences, -1)
    lengths = np.zeros(sequences, np.int64)
    steps: list[ForwardBatch] = []
    for _ in range(4):
        members = rng.permutation(sequences)[: rng.integers(1, sequences + 1)]
        room = tables.shape[1] * block_size - lengths[members]
        longest = rng.choice([30, 150])  # in one or in several blocks for each core
        chunks = np.where(rng.random(len(members)) < 0.5, 1, rng.integers(1, longest, len(members)))
        chunks = np.minimum(chunks, room)
        members, chunks = members[chunks > 0], chunks[chunks > 0]
        if not len(members):
            continue
        lengths[members] += chunks
        total = int(chunks.sum())
        logit_rows = np.flatnonzero(rng.random(total) < rng.choice([0.05, 0.7, 1.0]))
        logit_rows = logit_rows if len(logit_rows) or steps else np.array([total - 1])
        # In any order, and some of them twice, as log-probabilities of prompts are asked for.
        if len(logit_rows) and rng.random() < 0.5:
            twice = rng.choice(logit_rows, rng.integers(0, total))
            logit_rows = rng.permutation(np.concatenate([logit_rows, twice]))
        tokens = rng.integers(3, VOCAB, total)
        steps.append(ForwardBatch.build(tokens, chunks, lengths[members], tables[members], block_size, logit_rows))
    return steps


def logits(runner: ModelRunner, steps: list[ForwardBatch]) -> torch.Tensor:
    return torch.cat([runner.backend.logits(step) for step in steps]).double()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("arch", FUSED)
@pytest.mark.parametrize("tied", [True, False])
def test_float32_stack_gives_the_logits_of_the_modules(arch: str, tied: bool, tmp_path_factory: Any) -> None:
    rng = np.random.default_rng()
    loaded = load(arch, "float32", tmp_path_factory.getbasetemp(), tie_word_embeddings=tied, seed=int(tied))
    assert loaded.stack is not None
    for block_size in (16, 32, 64):
        steps = batches(rng, block_size, 512 // block_size)
        fused, reference = (ModelRunner(loaded, 512 // block_size, block_size, name) for name in ("cpu", "reference"))
        assert relative(logits(fused, steps), logits(reference, steps)) < 1e-5


@pytest.mark.parametrize("arch", FUSED)
@pytest.mark.parametrize("without_onednn", [False, True])
def test_bfloat16_stack_is_no_further_from_the_truth_than_the_modules(
    arch: str, without_onednn: bool, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as on processors for which oneDNN packs nothing."""
    if without_onednn:
        monkeypatch.setattr("model_worker.cpu.gemm.packed_linear._onednn_packs", lambda dtype: False)
    rng = np.random.default_rng()
    folder = tmp_path_factory.getbasetemp()
    loaded = load(arch, "bfloat16", folder, seed=3)
    assert loaded.stack is not None
    # The same rounded weights, in arithmetic that does not round.
    exact_model: Any = AutoModelForCausalLM.from_pretrained(
        loaded.model.config._name_or_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).float()
    steps = batches(rng, 16, 32)
    want = logits(ModelRunner(loaded, 32, 16, "reference"), steps)
    got = logits(ModelRunner(loaded, 32, 16), steps)
    exact = truth(exact_model, steps)
    assert relative(got, exact) < max(0.02, 1.3 * relative(want, exact))


def truth(model: Any, steps: list[ForwardBatch]) -> torch.Tensor:
    """Logits of transformers' own forward pass in float32, one sequence at a time."""
    texts: dict[int, list[int]] = {}
    rows = []
    with torch.no_grad():
        for step in steps:
            every = []
            for s in range(step.num_sequences):
                text = texts.setdefault(int(step.block_tables[s, 0]), [])
                new = step.tokens[step.query_start[s] : step.query_start[s + 1]].tolist()
                text += new
                every.append(model(input_ids=torch.tensor([text])).logits[0, -len(new) :])
            rows.append(torch.cat(every)[step.logit_positions])
    return torch.cat(rows).double()


@pytest.mark.parametrize("arch", FUSED)
def test_greedy_tokens_equal_generate(arch: str, tmp_path_factory: Any) -> None:
    """Prompts together, then a token each per step, against one prompt at a time in transformers."""
    rng = np.random.default_rng()
    loaded = load(arch, "float32", tmp_path_factory.getbasetemp())
    model: Any = AutoModelForCausalLM.from_pretrained(loaded.model.config._name_or_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    texts = [rng.integers(3, VOCAB, rng.integers(1, 60)) for _ in range(9)]
    expected = [
        model.generate(torch.from_numpy(text)[None], do_sample=False, max_new_tokens=20)[0].tolist() for text in texts
    ]
    runner, tables = ModelRunner(loaded, 9 * 5, 16), rng.permutation(9 * 5).reshape(9, 5)
    chunks = texts
    for _ in range(20):
        lengths = np.array([len(text) for text in texts])
        sizes = np.array([len(chunk) for chunk in chunks])
        batch = ForwardBatch.build(np.concatenate(chunks), sizes, lengths, tables, 16, np.cumsum(sizes) - 1)
        chunks = list(runner.backend.logits(batch).argmax(-1, keepdim=True).numpy())
        texts = [np.concatenate(pair) for pair in zip(texts, chunks, strict=True)]
    assert [text.tolist() for text in texts] == expected


@pytest.mark.parametrize("arch", [*FUSED, "gpt2"])
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_picked_tokens_are_the_largest_logits(arch: str, dtype: str, quantization: str, tmp_path_factory: Any) -> None:
    rng = np.random.default_rng()
    loaded = load(arch, dtype, tmp_path_factory.getbasetemp(), quantization)
    whole, picking = ModelRunner(loaded, 32, 16), ModelRunner(loaded, 32, 16)
    for step in batches(rng, 16, 32):
        wanted = rng.random(len(step.logit_positions)) < rng.choice([0, 0.3, 1])
        every = whole.backend.logits(step)
        tokens, some = picking.backend.greedy(step, wanted)
        assert tokens.tolist() == every.argmax(-1).tolist()
        assert torch.equal(some, every[torch.from_numpy(wanted)])


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("gemma2", "not built like Llama's"),
        ("gemma3_text", "not built like Llama's"),
        ("gpt2", "not built like Llama's"),
        ("olmo2", "not built like Llama's"),
        ("qwen3_moe", "not built like Llama's"),
    ],
)
def test_the_log_says_why_a_model_is_not_served_by_the_stack(
    arch: str, reason: str, tmp_path_factory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "model_worker.cpu.fused.stack"):
        loaded = load(arch, "float32", tmp_path_factory.getbasetemp())
    (line,) = [record.getMessage() for record in caplog.records if "is not served by the fused stack" in record.msg]
    assert line.startswith(loaded.architecture)
    assert reason in line


@pytest.mark.parametrize("check", ["stack_differs", "far_stack_differs"])
def test_a_stack_that_gives_other_logits_is_not_used(
    check: str, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verify, check, lambda *_: True)
    loaded = load("llama", "float32", tmp_path_factory.getbasetemp())
    assert loaded.stack is None
    assert "by transformers' modules, since the stack gives other logits" in caplog.text


@pytest.fixture
def two_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FUSED)
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_launched_passes_give_what_passes_one_by_one_give(
    arch: str, dtype: str, quantization: str, two_cores: None, tmp_path_factory: Any
) -> None:
    """To the last bit, in the cache too, although a pass is launched before the tokens of the last one are read."""
    rng = np.random.default_rng()
    loaded = load(arch, dtype, tmp_path_factory.getbasetemp(), quantization, seed=7)
    overlapped, single = ModelRunner(loaded, 64, 16), ModelRunner(loaded, 64, 16)
    count, steps = int(rng.integers(1, 7)), int(rng.integers(2, 20))
    tables = rng.permutation(64)[: count * 8].reshape(count, 8)
    lengths, text = rng.integers(1, 99, count), rng.integers(3, VOCAB, 99)
    shared = int(rng.integers(0, lengths.min() // 16 + 1))
    tables[:, :shared] = tables[0, :shared]  # blocks of the same tokens, as the prefix cache has them
    tokens, rows, last_tokens = rng.integers(3, VOCAB, count), rng.permutation(9)[:count], np.full(9, -1)
    for length, table in zip(lengths, tables, strict=True):
        for runner in (overlapped, single):
            size = np.array([length])
            runner.backend.logits(ForwardBatch.build(text[:length], size, size, table[None], 16, size - 1))

    def step(number: int, tokens: NDArray[np.int64]) -> ForwardBatch:
        return ForwardBatch.build(tokens, np.ones(count, int), lengths + 1 + number, tables, 16, np.arange(count))

    known = DeferredTokens(np.full(count, -1), rows, last_tokens)
    waiting = [overlapped.backend.launch(step(0, tokens), known)]
    got = []
    for number in range(steps):
        # Its tokens are those that the pass before draws.
        waiting.append(overlapped.backend.launch(step(number + 1, np.zeros(count, int)), known._replace(unread=rows)))
        got.append(waiting.pop(0)())
    got.append(waiting.pop()())
    # Both share the buffers of one stack, and passes are waited for in the order of their launch.
    for number, drawn in enumerate(got):
        tokens = single.backend.greedy(step(number, tokens), np.zeros(count, np.bool_))[0]
        assert drawn.tolist() == tokens.tolist()
    assert last_tokens[rows].tolist() == got[-1].tolist()
    for one, other in zip(overlapped.cache.k + overlapped.cache.v, single.cache.k + single.cache.v, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_many_tokens_at_once_give_what_a_few_at_a_time_give(
    dtype: str, head_dim: int, two_cores: None, tmp_path_factory: Any
) -> None:
    """To the last bit, although cores share them otherwise, and the last layer leaves out those nobody asks about."""
    rng = np.random.default_rng()
    loaded = load("llama", dtype, tmp_path_factory.getbasetemp(), head_dim=head_dim)
    assert loaded.stack is not None
    count = int(rng.integers(2, 6)) * BLOCK_TOKENS + int(rng.integers(1, 60))  # in blocks for each of two cores
    tokens, table = rng.integers(3, VOCAB, count), rng.permutation(24)[None]
    wanted = np.unique(rng.integers(0, count, rng.choice([1, 5, count])))
    at_once, few = ModelRunner(loaded, 24, 16), ModelRunner(loaded, 24, 16)
    batch = ForwardBatch.build(tokens, np.array([count]), np.array([count]), table, 16, wanted)
    parts = []
    for first in range(0, count, 37):
        end = min(first + 37, count)
        here = wanted[(wanted >= first) & (wanted < end)] - first
        lengths = np.array([end - first]), np.array([end])
        parts.append(few.backend.logits(ForwardBatch.build(tokens[first:end], *lengths, table, 16, here)))
    assert torch.equal(at_once.backend.logits(batch), torch.cat(parts))
    assert all(torch.equal(a, b) for a, b in zip(at_once.cache.k, few.cache.k, strict=True))


def test_what_an_earlier_sequence_left_in_a_block_does_not_matter(tmp_path_factory: Any) -> None:
    """Not even numbers that are none: their weight is zero, but zero times NaN is NaN."""
    loaded = load("llama", "bfloat16", tmp_path_factory.getbasetemp())
    steps = batches(np.random.default_rng(), 16, 32)
    clean, dirty = ModelRunner(loaded, 32, 16), ModelRunner(loaded, 32, 16)
    for blocks in dirty.cache.k + dirty.cache.v:
        blocks.fill_(torch.nan)
    assert torch.equal(logits(clean, steps), logits(dirty, steps))


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_forms_run_as_modules(arch: str, dtype: str, tmp_path_factory: Any) -> None:
    assert load(arch, dtype, tmp_path_factory.getbasetemp()).stack is None


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, TILE_ROWS),
    st.integers(1, 130),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(-2, 140),
)
def test_tiles_multiply(rows: int, inputs: int, dtype: torch.dtype, turn: int) -> None:
    packed = PackedLinear(torch.randn(2 * PANEL, inputs).to(dtype), None)
    panels = packed.panels
    width = panels.shape[1] * 4 // dtype.itemsize
    x = torch.zeros(rows + 3, width, dtype=dtype)
    x[:, :inputs] = torch.randn(rows + 3, inputs)
    like = np.empty(1, np.uint16 if dtype == torch.bfloat16 else np.float32)
    array = x.view(torch.uint16).numpy() if operand_dtype(like.dtype) == np.uint16 else x.float().numpy()
    want = x[2 : 2 + rows, :inputs].double() @ packed.weight[PANEL:].double().T
    whole, half = np.zeros((TILE_ROWS, PANEL), np.float32), np.zeros((TILE_ROWS, PANEL), np.float32)
    address = panels.ctypes.data + panels[0].nbytes
    early = address, STEP_BYTES, turn, -STEP_BYTES
    multiply_panel(array, like, 2, rows, address, early, whole)
    multiply_half_panel(array, like, 2, rows, address + PANEL // 2 * 4, early, half)
    assert relative(torch.from_numpy(whole[:rows]).double(), want) < 1e-5
    assert np.allclose(half[:rows, : PANEL // 2], whole[:rows, PANEL // 2 :], rtol=1e-5, atol=1e-5)
    assert not whole[rows:].any()


@njit(nogil=True)
def _all_phases(core: int, counter: Any, cores: int, grain: int, owners: Any, times: Any, early: Any) -> None:
    """Each phase's pieces are marked by who takes them; `early` counts those taken before the phase before was done."""
    phase, pieces = phase_of(counter), owners.shape[1]
    while phase < len(owners):
        done = 0
        first, count = take(counter, phase, pieces, grain, core, cores)
        while count > 0:
            for piece in range(first, first + count):
                owners[phase, piece] = core + 1
                times[phase, piece] += 1
                if phase > 0 and times[phase - 1].min() == 0:
                    early[core] += 1
            done += count
            first, count = take(counter, phase, pieces, grain, core, cores)
        if done > 0 and arrived_last(counter, done, pieces):
            phase += 1
            begin(counter, OVER if phase == len(owners) else phase)
        else:
            wait(counter, phase)
        phase = phase_of(counter)


@pytest.mark.parametrize("cores", [1, 2, 5])
@pytest.mark.parametrize("grain", [1, 2, 8])
def test_every_piece_is_done_once_and_after_the_phase_before(cores: int, grain: int) -> None:
    thread_pool = ThreadPool(cores)
    for _ in range(3):
        owners, early = np.zeros((100, 96), np.int64), np.zeros(cores, np.int64)
        times = np.zeros_like(owners)
        thread_pool.run(_all_phases, cores, grain, owners, times, early)
        assert (times == 1).all()
        assert set(owners.ravel().tolist()) <= set(range(1, cores + 1))
        assert not early.any()


def test_nobody_waits_for_who_has_not_come() -> None:
    """Jobs are done while who began them does something else, in their order, and asking for them then is no work."""
    thread_pool, jobs = ThreadPool(2), []
    marks = [(np.zeros((50, 30), np.int64), np.zeros((50, 30), np.int64), np.zeros(2, np.int64)) for _ in range(3)]
    for owners, times, early in marks:
        jobs.append(thread_pool.begin(_all_phases, 2, 2, owners, times, early))
    limit = time.monotonic() + 60
    while not all((times == 1).all() for _, times, _ in marks):
        assert time.monotonic() < limit, "the other core does nothing"
        time.sleep(0.01)
    for job, (owners, times, early) in zip(jobs, marks, strict=True):
        job.finish()
        assert (owners == 2).all()
        assert (times == 1).all()
        assert not early.any()


def test_who_loses_its_core_while_a_phase_begins_waits_for_nothing_that_has_been() -> None:
    """Others may end that phase and the job meanwhile; once this left a thread asleep for good, and a core idle."""
    counter = np.zeros(64, np.int64)
    begin(counter, 9)
    begin(counter, 5)  # by who stood still since then
    waiting = threading.Thread(target=wait, args=(counter, 5), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 5), st.randoms())
def test_pieces_are_taken_in_whole_grains_from_both_ends(pieces: int, grain: int, cores: int, rng: Any) -> None:
    """Panels are whole as long as grains are: halves come only from the last grain that is left."""
    pieces *= grain
    counter, seen, left = np.zeros(64, np.int64), np.zeros(pieces, np.int64), pieces
    while left:
        core = rng.randrange(cores)
        first, count = take(counter, 0, pieces, grain, core, cores)
        assert 0 < count <= left
        seen[first : first + count] += 1
        if left > grain:
            assert count % grain == 0
            assert first % grain == 0
            before = seen[: first + count] if core % 2 == 0 else seen[first:]
            assert (before == 1).all(), "each end is taken through neighbours"
        left -= count
    assert (seen == 1).all()
    assert take(counter, 0, pieces, grain, 0, cores) == (0, 0)
    assert take(np.zeros(64, np.int64), 1, pieces, grain, 0, cores) == (0, 0), "that phase is over, or has not come"
