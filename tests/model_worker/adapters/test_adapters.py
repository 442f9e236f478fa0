"""Models with adapters compute what models with merged weights compute, and rows do not touch each other."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from model_worker.backends.base import Backend
from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.cpu.fused.phases import BLOCK_TOKENS
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.adapters.made import LINEARS, PROJECTIONS, Made, Recipe, make
from tests.model_worker.tiny_models import VOCAB, tiny_model

FUSED = ("llama", "qwen2", "qwen3", "phi3")
MODULES = ("gemma3_text", "mixtral", "gpt2")
BLOCK = 16
HEAD = ("lm_head", "embed_tokens")
PATTERNS = {"use_rslora": True, "rank_pattern": {r"(layers|h)\.0\..*": 9}, "alpha_pattern": {"[qu].*_proj": 5}}


def base(arch: str, folder: Path, **overrides: Any) -> Path:
    wide = {"hidden_size": 64} if arch in ("phi3", "qwen2") else {}
    return tiny_model(arch, folder, **{**wide, **overrides})


def load(path: Path, dtype: str = "float32", quantization: str = "none") -> LoadedModel:
    return load_model(path, dtype, "cpu", lambda *_: None, quantization=quantization)


def recipes(arch: str) -> dict[str, Recipe]:
    targets = LINEARS.get(arch, PROJECTIONS)
    kinds = {
        "plain": Recipe(targets=targets),
        "patterns": Recipe(targets=targets, config=PATTERNS),
        "DoRA": Recipe(targets=targets, dora=True),
        "lora_bias": Recipe(targets=targets, lora_bias=True),
        "own bias": Recipe(targets=targets, dora=True, own_bias=True),
        "one linear of a high rank": Recipe(targets=targets[:1], rank=70),
    }
    if arch in ("qwen2", "llama", "gemma3_text"):
        kinds["all"] = Recipe(targets=(*targets, *HEAD), rank=5)
    return kinds


def prompt(tokens: NDArray[np.int64], blocks: NDArray[np.integer[Any]], handle: int) -> ForwardBatch:
    """The batch of a whole prompt, all logits wanted."""
    count = np.array([len(tokens)])
    return ForwardBatch.build(
        tokens, count, count, blocks[None], BLOCK, np.arange(len(tokens)), adapters=np.array([handle], np.int32)
    )


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def truth(made: Made, tokens: NDArray[np.int64]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = made.merged(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    return logits


@pytest.mark.parametrize("arch", [*FUSED, *MODULES])
def test_every_kind_gives_the_logits_of_merged_weights(arch: str, tmp_path_factory: Any, tmp_path: Path) -> None:
    path = base(arch, tmp_path_factory.getbasetemp())
    loaded = load(path)
    assert (loaded.stack is not None) == (arch in FUSED)
    rng = np.random.default_rng()
    runner = ModelRunner(loaded, 64, BLOCK)
    for handle, (name, recipe) in enumerate(recipes(arch).items(), start=1):
        made = make(path, tmp_path / name, recipe, seed=handle)
        facts = runner.backend.load_adapter(handle, str(made.folder))
        assert facts.rank == max(recipe.rank, 9 if name == "patterns" else 0)
        # Few tokens, which cores share, and many, which they take in blocks.
        for count in (1, int(rng.integers(2, 60)), 3 * BLOCK_TOKENS):
            tokens = rng.integers(3, VOCAB, count)
            got = runner.backend.logits(prompt(tokens, rng.permutation(64)[: 1 + count // BLOCK], handle))
            assert relative(got, truth(made, tokens)) < 1e-5, name


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bfloat16_adapters_are_as_exact_as_the_model(quantization: str, tmp_path_factory: Any, tmp_path: Path) -> None:
    path = base("qwen2", tmp_path_factory.getbasetemp())
    loaded = load(path, "bfloat16", quantization)
    assert loaded.stack is not None
    recipe = Recipe(targets=(*PROJECTIONS, *HEAD), rank=6)
    made = make(path, tmp_path / "adapter", recipe, seed=1, dtype=torch.bfloat16)
    runner = ModelRunner(loaded, 64, BLOCK)
    runner.backend.load_adapter(3, str(made.folder))
    tokens = np.random.default_rng(5).integers(3, VOCAB, 40)
    blocks = np.arange(3)
    adapted = relative(runner.backend.logits(prompt(tokens, blocks, 3)), truth(made, tokens))
    assert adapted < (0.05 if quantization == "none" else 0.08)
    # Without the adapter it is another model.
    assert relative(runner.backend.logits(prompt(tokens, blocks, 0)), truth(made, tokens)) > 0.3


class Rows:
    """Sequences with adapters, each with blocks of its own, on one runner."""

    def __init__(self, runner: ModelRunner, texts: list[NDArray[np.int64]], handles: list[int]) -> None:
        self.backend: Backend = runner.backend
        self.texts = list(texts)
        self.handles = np.array(handles, np.int32)
        self.computed = np.zeros(len(texts), np.int64)
        self.blocks = np.arange(len(texts) * 20, dtype=np.int32).reshape(len(texts), -1)

    def step(self, members: list[int]) -> torch.Tensor:
        """Compute what is new of some rows together. Returns the logits of the last token of each."""
        chunks = [self.texts[s][self.computed[s] :] for s in members]
        lengths = np.array([len(chunk) for chunk in chunks])
        totals = np.array([len(self.texts[s]) for s in members])
        self.computed[members] = totals
        handles = self.handles[members]
        return self.backend.logits(
            ForwardBatch.build(
                np.concatenate(chunks),
                lengths,
                totals,
                self.blocks[members],
                BLOCK,
                np.cumsum(lengths) - 1,
                adapters=handles if handles.any() else None,
            )
        )


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_rows_together_have_the_bits_that_they_have_alone(
    dtype: str, quantization: str, tmp_path_factory: Any, tmp_path: Path
) -> None:
    """Four adapters of different kinds, and base rows beside them that never saw an adapter."""
    path = base("qwen2", tmp_path_factory.getbasetemp())
    loaded = load(path, dtype, quantization)
    assert loaded.stack is not None
    kinds = ["plain", "patterns", "DoRA", "all"]
    runners = [ModelRunner(loaded, 16 * 20, BLOCK) for _ in range(2)]
    plain = ModelRunner(loaded, 16 * 20, BLOCK)
    for handle, name in enumerate(kinds, start=1):
        made = make(path, tmp_path / name, recipes("qwen2")[name], seed=handle)
        for runner in runners:
            # The stack is the model's, and so are its adapters.
            runner.backend.load_adapter(handle, str(made.folder))
    rng = np.random.default_rng()
    handles = [0, 0, 0, *rng.integers(0, 5, 9).tolist()]
    texts = [rng.integers(3, VOCAB, rng.choice([1, 5, 33, 90])) for _ in handles]
    together = Rows(runners[0], texts, handles)
    alone = Rows(runners[1], texts, handles)
    untouched = Rows(plain, texts, [0] * len(texts))
    for turn in range(4):
        members = rng.permutation(len(texts)).tolist()
        members = members if turn % 2 else members[:7]
        got = together.step(members)
        want = torch.cat([alone.step([s]) for s in members])
        assert torch.equal(got, want)
        for place, s in enumerate(members):
            if handles[s] == 0:
                assert torch.equal(untouched.step([s])[0], got[place])
            token = got[place].argmax().item()
            for rows in (together, alone, untouched):
                rows.texts[s] = np.append(rows.texts[s], token)


def test_modules_leave_base_rows_as_they_are(tmp_path_factory: Any, tmp_path: Path) -> None:
    path = base("gpt2", tmp_path_factory.getbasetemp())
    runner = ModelRunner(load(path), 160, BLOCK)
    made = [make(path, tmp_path / str(i), Recipe(targets=LINEARS["gpt2"]), seed=i) for i in (1, 2)]
    rng = np.random.default_rng()
    texts = [rng.integers(3, VOCAB, count) for count in (5, 9, 7, 1)]
    before = Rows(runner, texts, [0, 0, 0, 0]).step([0, 1, 2, 3])
    for handle, adapter in enumerate(made, start=1):
        runner.backend.load_adapter(handle, str(adapter.folder))
    got = Rows(runner, texts, [1, 0, 2, 0]).step([0, 1, 2, 3])
    assert torch.equal(got[[1, 3]], before[[1, 3]])
    for place, adapter in ((0, made[0]), (2, made[1])):
        assert relative(got[place], truth(adapter, texts[place])[-1]) < 1e-5
    for handle in (1, 2):
        runner.backend.drop_adapter(handle)
    assert torch.equal(Rows(runner, texts, [0, 0, 0, 0]).step([0, 1, 2, 3]), before)
    assert not any(module._forward_hooks for module in runner.loaded.model.modules())


@pytest.mark.parametrize("targets", [PROJECTIONS, (*PROJECTIONS, *HEAD)])
def test_launched_passes_draw_the_tokens_of_the_adapters(
    targets: tuple[str, ...], tmp_path_factory: Any, tmp_path: Path
) -> None:
    """Also where the tokens of the pass before are not read yet, and a new embedding must be made of them."""
    path = base("llama", tmp_path_factory.getbasetemp())
    loaded = load(path, "bfloat16")
    runners = [ModelRunner(loaded, 40, BLOCK) for _ in range(2)]
    made = make(path, tmp_path / "adapter", Recipe(targets=targets), seed=1)
    for runner in runners:
        runner.backend.load_adapter(1, str(made.folder))
    tables = np.arange(40, dtype=np.int32).reshape(2, -1)
    handles = np.array([1, 0], np.int32)
    last = np.zeros(2, np.int64)
    waiting = []
    tokens = np.array([5, 9])
    want: list[list[int]] = []
    for turn in range(6):
        lengths = np.array([turn + 1, turn + 1])
        unread = np.array([-1, -1]) if turn == 0 else np.array([0, 1])
        arguments = np.ones(2, np.int64), lengths, tables, BLOCK, np.arange(2)
        batch = ForwardBatch.build(np.array([5, 9]), *arguments, adapters=handles)
        deferred = DeferredTokens(unread, np.arange(2), last)
        waiting.append(runners[0].backend.launch(batch, deferred))
        if len(waiting) > 1:
            want_now = waiting.pop(0)().tolist()
            assert want_now == want.pop(0)
        logits = runners[1].backend.logits(ForwardBatch.build(tokens, *arguments, adapters=handles))
        tokens = logits.argmax(-1).numpy()
        want.append(tokens.tolist())
    assert waiting[0]().tolist() == want[0]


@pytest.mark.slow
def test_two_hundred_loads_and_drops_leave_nothing(tmp_path_factory: Any, tmp_path: Path) -> None:
    path = base("qwen2", tmp_path_factory.getbasetemp())
    runner = ModelRunner(load(path), 16, BLOCK)
    made = make(path, tmp_path / "adapter", Recipe(rank=32), seed=1)
    tokens = np.arange(3, 12)
    process = psutil.Process()
    sizes = []
    first = None
    for turn in range(200):
        facts = runner.backend.load_adapter(turn + 1, str(made.folder))
        got = runner.backend.logits(prompt(tokens, np.arange(1), turn + 1))
        first = got if first is None else first
        assert torch.equal(got, first)
        runner.backend.drop_adapter(turn + 1)
        if turn % 50 == 49:
            gc.collect()
            sizes.append(process.memory_info().rss)
    # A leak of each adapter would be 50 times its size.
    assert sizes[-1] - sizes[0] < 20 * facts.size


def test_a_refused_adapter_leaves_nothing(tmp_path_factory: Any, tmp_path: Path) -> None:
    path = base("llama", tmp_path_factory.getbasetemp())
    other = base("qwen2", tmp_path_factory.getbasetemp())
    backend = ModelRunner(load(path), 16, BLOCK).backend
    made = make(other, tmp_path / "adapter", Recipe(), seed=1)
    with pytest.raises(ValueError, match="another model"):
        backend.load_adapter(1, str(made.folder))
    backend.drop_adapter(1)
