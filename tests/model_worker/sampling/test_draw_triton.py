"""Triton's draw, interpreted on the CPU, draws the tokens that the sampler draws with the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from interfaces import LogprobMode, SamplingParams
from model_worker.cuda.draw_record import NAMES, RECORD
from model_worker.device_copy import HostRing
from model_worker.sampling import device_draw, draw_proof, draw_triton
from model_worker.sampling.ahead import report_start
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import DrawStep, TritonDraw
from model_worker.sampling.sampler import SamplerRows
from tests.model_worker.cuda.interpreter import need_triton

need_triton()

CPU = torch.device("cpu")
EMPTY = np.empty(0, np.int32)
ROWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 30},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.2, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.01},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.9, "top_k": 9, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.3},
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that narrow rows have several parts, and not all of a row fits into the scratch memory.

    What an interpreted kernel takes follows the number of its blocks, not their size."""
    monkeypatch.setattr(draw_triton, "_BLOCK", 128)
    monkeypatch.setattr(draw_triton, "_BLOCKS", 2)
    monkeypatch.setattr(draw_triton, "_EDGE_BLOCK", 512)
    monkeypatch.setattr(draw_triton, "_ROOM", 128)


def sampler_of(rows: int, width: int, kernels: bool = True) -> SamplerRows:
    sampler = SamplerRows(rows, width, CPU, counts_there=True)
    if kernels:
        sampler.use_kernels(TritonDraw(CPU, width))
    return sampler


@pytest.mark.parametrize(
    ("width", "levels", "dtype"),
    [
        (5, None, torch.bfloat16),
        (700, None, torch.float32),
        (700, None, torch.bfloat16),
        (700, 4, torch.bfloat16),
        (300, 1, torch.float32),
    ],
)
def test_tokens_equal_the_samplers(width: int, levels: int | None, dtype: torch.dtype) -> None:
    """`levels` is how many different logits there are, so that many are equal at the edges."""
    rng = np.random.default_rng()
    sampler = sampler_of(len(ROWS), width)
    held = rng.permutation(len(ROWS)).astype(np.int32)
    for row, values in zip(held.tolist(), ROWS, strict=True):
        sampler.join(row, SamplingParams(seed=int(rng.integers(1 << 64, dtype=np.uint64)), **values), [], EMPTY, EMPTY)
    logits = rng.normal(0, 3, (len(ROWS), width)) if levels is None else rng.integers(0, levels, (len(ROWS), width))
    # Logits may be wider than the vocabulary.
    table = torch.from_numpy(np.pad(logits, ((0, 0), (0, 3)), constant_values=99).astype(np.float32)).to(dtype)
    table[1, rng.random(width + 3) < 0.3] = -torch.inf
    table[1, 0] = 1.0
    # Fewer tokens are possible than its top-k.
    table[2, 3:] = -torch.inf
    table[4, rng.integers(width)] = torch.nan
    positions = rng.integers(0, 1 << 20, len(ROWS))
    want = sampler.sample(table.clone(), held, positions)
    assert want.bad is not None
    last_tokens = torch.full((len(ROWS),), 77)
    got = sampler.sample_ahead(table, held, positions, last_tokens=last_tokens).tokens.numpy()
    np.testing.assert_array_equal(got, np.where(want.bad, -1, want.tokens))
    np.testing.assert_array_equal(last_tokens[held], want.tokens)


def test_a_top_k_reads_no_tile_without_its_tokens() -> None:
    """Behind the first pass, what lies in other tiles is of no account."""
    rng = np.random.default_rng()
    width, near = 2048, 512
    kernels = TritonDraw(CPU, width)
    sampler = sampler_of(2, width)
    for row, top_k in enumerate((1, 4)):
        sampler.join(row, SamplingParams(temperature=1.0, top_k=top_k, top_p=0.99, seed=row), [], EMPTY, EMPTY)
    rows, positions = np.arange(2, dtype=np.int32), np.zeros(2, np.int64)
    logits = torch.from_numpy(rng.normal(0, 1, (2, width)).astype(np.float32))
    logits[:, :near] += 20
    records = torch.from_numpy(sampler.arrays(rows, positions)[0])
    step = DrawStep(records, draws=True)
    want, _ = kernels.draw(logits.clone(), step)
    changed = kernels._room(2).tops
    kernels._extremes(logits, changed, step)
    logits[:, near:] = 1000.0
    kernels._draw(logits, changed, records)
    got, _ = kernels._finish(logits, changed, step)
    assert torch.equal(got, want)
    assert bool((got < near).all())


def test_only_rows_with_penalties_or_rules_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng()
    width, rows, changing = 300, 6, (1, 4)
    sampler = sampler_of(rows, width)
    for row in range(rows):
        more: dict[str, Any] = {"presence_penalty": 2.0} if row == changing[0] else {}
        more |= {"logit_bias": {7: 9.0}} if row == changing[1] else {}
        params = SamplingParams(temperature=row % 2 * 1.0, top_p=0.9, seed=row, **more)
        sampler.join(row, params, [], EMPTY, np.arange(5, dtype=np.int32))
    logits = torch.from_numpy(rng.normal(size=(rows, width)).astype(np.float32)).bfloat16()
    held, positions = rng.permutation(rows).astype(np.int32), np.full(rows, 5)
    want = sampler.sample(logits.clone(), held, positions)
    shapes = []
    extremes = TritonDraw._extremes

    def seen(self: TritonDraw, logits: Any, changed: torch.Tensor, step: DrawStep) -> None:
        shapes.append((changed.shape, changed.dtype))
        extremes(self, logits, changed, step)

    monkeypatch.setattr(TritonDraw, "_extremes", seen)
    # As it was before the token of `want` was counted.
    sampler.drop(changing[0])
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=changing[0], presence_penalty=2.0)
    sampler.join(changing[0], params, [], EMPTY, np.arange(5, dtype=np.int32))
    got = sampler.sample_ahead(logits, held, positions).tokens
    assert got.tolist() == want.tokens.tolist()
    assert shapes == [((len(changing), width), torch.float32)]


def test_tokens_come_in_proportion_to_their_probabilities() -> None:
    """With fixed seeds, so that it cannot fail by chance."""
    rows, width = 60, 5
    sampler = sampler_of(rows, width)
    for row in range(rows):
        sampler.join(row, SamplingParams(temperature=1.0, seed=row), [], EMPTY, EMPTY)
    logits = torch.linspace(-1.5, 0, width)
    held = np.arange(rows, dtype=np.int32)
    tokens = sampler.sample_ahead(logits.expand(rows, width), held, np.zeros(rows, np.int64)).tokens
    counts = np.bincount(tokens.numpy(), minlength=width)
    expected = logits.double().softmax(0).numpy() * rows
    assert stats.chisquare(counts, expected).pvalue > 0.01


def test_a_row_takes_its_own_mask() -> None:
    rng = np.random.default_rng()
    rows, width = 6, 150
    sampler = sampler_of(rows, width)
    for row in range(rows):
        wishes: dict[str, Any] = {"temperature": 1.0} if row % 2 else {"temperature": 0.0}
        sampler.join(row, SamplingParams(seed=row, **wishes), [], EMPTY, EMPTY)
    only = rng.permutation(width)[:rows]
    index = rng.permutation(rows)[:4].astype(np.int64)
    words = np.zeros((4, 5), np.int32)
    for i, place in enumerate(index.tolist()):
        token = int(only[place])
        words[i, token // 32] = np.array(1 << token % 32, np.uint32).astype(np.int32)
    logits = torch.from_numpy(rng.normal(size=(rows, width)).astype(np.float32)).bfloat16()
    free = logits.float().numpy().copy()
    held = np.arange(rows, dtype=np.int32)
    got = sampler.sample_ahead(logits, held, np.zeros(rows, np.int64), masks=RowMasks(index, words)).tokens.numpy()
    np.testing.assert_array_equal(got[index], only[index])
    greedy = [row for row in range(0, rows, 2) if row not in index.tolist()]
    np.testing.assert_array_equal(got[greedy], free[greedy].argmax(-1))


@pytest.mark.parametrize("is_clipped", [True, False])
def test_a_row_reports_no_more_tokens_than_there_are(is_clipped: bool) -> None:
    """The kernel keeps to the room of a row, whatever its record asks for."""
    rng = np.random.default_rng()
    width, asked = 10, (12, 3)
    sampler = sampler_of(2, width)
    for row, top in enumerate(asked):
        params = SamplingParams(temperature=1.0, logprobs=LogprobMode.TEMPERED, top_logprobs=top, seed=row)
        sampler.join(row, params, [], EMPTY, EMPTY)
    assert sampler._records.table["top_logprobs"].tolist() == [width, 3]
    if not is_clipped:
        sampler._records.table["top_logprobs"] = asked
    rows, positions = np.arange(2, dtype=np.int32), np.zeros(2, np.int64)
    logits = torch.from_numpy(rng.normal(size=(2, width)).astype(np.float32))
    want = sampler.sample(logits.clone(), rows, positions)
    ahead = sampler.sample_ahead(logits, rows, positions)
    tokens, _, got = ahead.read(ahead.memory.numpy())
    assert want.reports is not None
    assert got is not None
    np.testing.assert_array_equal(tokens, want.tokens)
    assert got.counts.tolist() == [width, 3]
    np.testing.assert_array_equal(got.ids, want.reports.ids)
    np.testing.assert_allclose(got.values, want.reports.values, atol=1e-5)


def test_each_part_of_a_row_finds_its_rules() -> None:
    """Parts have 256 tokens: some have many rules, some one at an edge, and some none."""
    rng = np.random.default_rng()
    width = 1100
    many = rng.choice(np.arange(256, 512), 200, replace=False)
    rules: tuple[dict[str, Any], ...] = (
        {"allowed_token_ids": [0, 255, *many.tolist(), 1099]},
        {"logit_bias": {int(token): float(rng.normal() * 9) for token in (511, 512, 768, *many)}},
        {"bad_words": [[int(token)] for token in range(900)]},
        {"allowed_token_ids": [1024]},
    )
    sampler = sampler_of(len(rules), width)
    for row, rule in enumerate(rules):
        params = SamplingParams(temperature=0.0, logprobs=LogprobMode.TEMPERED, top_logprobs=64, **rule)
        sampler.join(row, params, [], EMPTY, EMPTY)
    rows, positions = np.arange(len(rules), dtype=np.int32), np.zeros(len(rules), np.int64)
    logits = torch.from_numpy(rng.normal(size=(len(rules), width)).astype(np.float32))
    want = sampler.sample(logits.clone(), rows, positions)
    ahead = sampler.sample_ahead(logits, rows, positions)
    tokens, _, got = ahead.read(ahead.memory.numpy())
    np.testing.assert_array_equal(tokens, want.tokens)
    assert want.reports is not None
    assert got is not None
    np.testing.assert_array_equal(got.counts, want.reports.counts)
    np.testing.assert_array_equal(got.ids, want.reports.ids)
    np.testing.assert_allclose(got.values, want.reports.values, atol=1e-4)
    assert got.counts.tolist() == [64, 64, 64, 1]


def pair() -> tuple[SamplerRows, SamplerRows]:
    return sampler_of(draw_proof.ROWS, 100, False), sampler_of(draw_proof.ROWS, 100, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_that_draw_torchs_tokens_are_proven(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if dtype == torch.float16:
        # Behind these steps kernels read what they have made of the logits themselves.
        monkeypatch.setattr(draw_proof, "_STEPS", draw_proof._STEPS[:4])
    assert draw_proof.proven(CPU, *pair(), dtype) is not None
    assert not caplog.text


def test_a_device_whose_kernels_draw_otherwise_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is wrong in one of the kernels' forms is found, in whichever steps it serves."""
    extremes, draws, finish = TritonDraw._extremes, TritonDraw._draw, TritonDraw._finish

    def changing(change: Callable[[DrawStep], DrawStep]) -> Any:
        def wrong(self: TritonDraw, logits: Any, changed: Any, step: DrawStep) -> None:
            extremes(self, logits, changed, change(step))

        return wrong

    def without_counts(step: DrawStep) -> DrawStep:
        return replace(step, counts=None if step.counts is None else torch.zeros_like(step.counts))

    def without_rules(step: DrawStep) -> DrawStep:
        records = step.records.clone()
        records[:, NAMES.index("rule_count")] = 0
        return replace(step, records=records)

    def wrong_for_the_models_dtype(self: TritonDraw, logits: torch.Tensor, changed: Any, records: torch.Tensor) -> None:
        draws(self, -logits, changed, records)

    def wrong_for_rows_that_change(self: TritonDraw, logits: torch.Tensor, changed: Any, records: torch.Tensor) -> None:
        draws(self, logits, -changed, records)

    def reads_beyond_rows(self: TritonDraw, logits: Any, changed: Any, step: DrawStep) -> None:
        extremes(self, logits.as_strided(logits.shape, (logits.shape[1], 1)), changed, step)

    def wrong_for_greedy_rows(self: TritonDraw, logits: torch.Tensor, changed: Any, step: DrawStep) -> Any:
        tokens, found = finish(self, logits, changed, step)
        return tokens if step.draws else tokens + 1, found

    def kept_nowhere(self: TritonDraw, logits: torch.Tensor, changed: Any, step: DrawStep) -> Any:
        return finish(self, logits, changed, replace(step, last_tokens=None))

    def wrong_in_reports(self: TritonDraw, logits: torch.Tensor, changed: Any, step: DrawStep) -> Any:
        return finish(self, logits if step.reports is None else logits.float() * 1.01, changed, step)

    def wrong_where_only_the_token_is_reported(
        self: TritonDraw, logits: torch.Tensor, changed: Any, step: DrawStep
    ) -> Any:
        tokens, found = finish(self, logits, changed, step)
        if step.reports is not None and found is not None:
            records = step.records.numpy().view(RECORD)[:, 0]
            alone = (records["report"] >= 0) & (records["top_logprobs"] == 0) & (records["name_count"] == 0)
            words = found[report_start(len(records)) :].view(torch.float32).view(step.reports.rows, -1)
            words[torch.from_numpy(records["report"][alone]), 0] += 1
        return tokens, found

    def fails(self: TritonDraw, logits: torch.Tensor, changed: Any, step: DrawStep) -> Any:
        raise TypeError("no such compiler\nand more")

    for name, wrong, *step in (
        ("_extremes", changing(lambda step: replace(step, masks=None)), draw_proof._PLAIN, True),
        ("_extremes", changing(without_counts), draw_proof._COUNTED, False),
        ("_extremes", changing(without_rules), draw_proof._RULED, False),
        ("_extremes", reads_beyond_rows, draw_proof._PLAIN, True),
        ("_draw", wrong_for_the_models_dtype, draw_proof._PLAIN, False),
        ("_draw", wrong_for_rows_that_change, draw_proof._COUNTED, False),
        ("_finish", wrong_for_greedy_rows, draw_proof._GREEDY, False),
        ("_finish", kept_nowhere, draw_proof._GREEDY, False),
        ("_finish", wrong_in_reports, draw_proof._REPORTED, False),
        ("_finish", wrong_where_only_the_token_is_reported, draw_proof._REPORTED, False),
        ("_finish", fails, draw_proof._GREEDY, False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(TritonDraw, name, wrong)
            # The one that finds it, since interpreted kernels are slow, and behind another, so that rows lie apart. It
            # comes again without a row that is bad.
            assert tuple(step) in draw_proof._STEPS
            patch.setattr(draw_proof, "_STEPS", (draw_proof._STEPS[0], tuple(step), tuple(step)))
            caplog.clear()
            assert draw_proof.proven(CPU, *pair(), torch.bfloat16) is None, wrong.__name__
            said = "no such compiler" if wrong is fails else "the kernels draw other tokens"
            assert said in caplog.text


def test_bitmasks_are_copied_where_kernels_cannot_read_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostRing, "lent", lambda _, words: nullcontext(torch.zeros(len(words), dtype=torch.int32)))
    monkeypatch.setattr(draw_proof, "_STEPS", (((0,), True),))
    copied = []

    def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
        if array.ndim == 2:
            copied.append(array)
        return torch.from_numpy(array)

    monkeypatch.setattr(device_draw, "upload", send)
    plain, other = pair()
    kernels = draw_proof.proven(CPU, plain, other)
    assert kernels is not None
    assert not kernels.reads_host_memory
    assert len(copied) == 1
    assert "bitmasks of grammars are copied to the device" in caplog.text
