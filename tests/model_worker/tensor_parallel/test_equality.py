"""Groups of real processes compute the tokens of one: this process is rank 0, and others are the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, ModelRefused
from model_worker.runner import ModelRunner
from model_worker.tensor_parallel.links import Leader
from model_worker.tensor_parallel.load import load_part
from model_worker.tensor_parallel.passes import GroupBackend
from tests.model_worker.speech.tiny_speaker import tiny_speaker
from tests.model_worker.tensor_parallel.rank import SECONDS, collectives, place
from tests.model_worker.test_runner import BLOCK_SIZE, Driver, random_prompts
from tests.model_worker.tiny_models import tiny_model

SLOT_BYTES = 1 << 12
BLOCKS = 16 * 13


class Groups:
    """Other ranks, each a process that follows from one group to the next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._others: list[subprocess.Popen[str]] = []

    @contextmanager
    def group(self, path: Path, ranks: int, distributed: bool = False) -> Iterator[tuple[LoadedModel, ModelRunner]]:
        while len(self._others) < ranks - 1:
            self._others.append(self._start(len(self._others) + 1))
        for other in self._others[: ranks - 1]:
            assert other.stdin is not None
            other.stdin.write(f"{path.name} {ranks} {distributed} {path}\n")
        where = place(self.folder, path.name, 0, ranks)
        leader = Leader(where, SLOT_BYTES, SECONDS)
        try:
            with collectives(where) if distributed else nullcontext() as joining:
                loaded = load_part(path, "float32", ranks, joining or leader.exchange, lambda *_: None)
                runner = ModelRunner(loaded, BLOCKS, BLOCK_SIZE, "cpu")
                leader.send(json.dumps({"num_blocks": BLOCKS, "block_size": BLOCK_SIZE}).encode())
                runner.backend = GroupBackend(runner.backend, BLOCK_SIZE, leader, joining)
                yield loaded, runner
        finally:
            leader.close()

    def close(self) -> None:
        for other in self._others:
            other.kill()
            other.wait()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.model_worker.tensor_parallel.rank", str(self.folder), str(rank)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True, bufsize=1)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    found = Groups(tmp_path_factory.mktemp("groups"))
    yield found
    found.close()


def assert_equal_tokens(path: Path, runner: ModelRunner, count: int = 8) -> int:
    """Returns the number of parameters of the whole model."""
    # One draw: other prompts may make the random model repeat itself, or bring two tokens that are nearly equal.
    rng = np.random.default_rng(1)
    prompts = random_prompts(rng, count)
    whole = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    expected = Driver(ModelRunner(whole, BLOCKS, BLOCK_SIZE, "reference"), prompts, rng).run()
    assert len({token for text in expected for token in text}) > 15, "the random model repeats itself"
    assert Driver(runner, prompts, rng).run() == expected
    return whole.parameter_count


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe"])
def test_tokens_of_two_ranks_are_those_of_one(arch: str, groups: Groups) -> None:
    path = tiny_model(arch, groups.folder)
    with groups.group(path, 2) as (loaded, runner):
        whole = assert_equal_tokens(path, runner)
        assert loaded.parameter_count < 0.8 * whole


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_expert_lies_on_one_rank(arch: str, ranks: int, groups: Groups) -> None:
    """Experts make up nine tenths of these models, as they do of real ones, of which each rank has its part."""
    folder = groups.folder / f"experts of {ranks}"
    folder.mkdir(exist_ok=True)
    wide = {"intermediate_size": 512, "moe_intermediate_size": 512}
    path = tiny_model(arch, folder, **wide, num_key_value_heads=4)
    with groups.group(path, ranks) as (loaded, runner):
        whole = assert_equal_tokens(path, runner, count=3)
        experts = [module for name, module in loaded.model.named_modules() if name.endswith("experts")]
        assert [module.num_experts for module in experts] == [4 // ranks] * 3
        assert all(len(weight) == 4 // ranks for module in experts for weight in module.parameters())
        assert loaded.parameter_count < 1.2 / ranks * whole


def test_tokens_of_four_ranks_are_those_of_one(groups: Groups) -> None:
    """Each of two KV heads lies on two ranks, the head is tied to the embedding, and 193 tokens make unequal parts."""
    path = tiny_model("llama", groups.folder, tie_word_embeddings=True)
    with groups.group(path, 4) as (loaded, runner):
        assert [layer.kv_heads for layer in loaded.attention.layout.layers] == [1, 1, 1]
        assert_equal_tokens(path, runner, count=3)


class Alone:
    """A rank whose model is refused before it computes anything."""

    rank = 0


@pytest.mark.parametrize(
    ("arch", "ranks", "reason"),
    [
        ("llama", 3, "its 4 attention heads .num_attention_heads. cannot be shared by 3 ranks equally"),
        ("gpt2", 2, "transformers has no plan to split it"),
    ],
)
def test_what_cannot_be_split_is_refused(arch: str, ranks: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=f"tensor_parallel {ranks}: {reason}"):
        load_part(tiny_model(arch, tmp_path), "float32", ranks, Alone(), lambda *_: None)  # type: ignore[arg-type]


def test_a_model_that_generates_speech_tokens_is_refused(tmp_path: Path) -> None:
    speaker = tiny_speaker(tmp_path / "speaker", "dac")
    reason = "tensor_parallel 2: a model that generates speech tokens is not split: leave it out"
    with pytest.raises(ModelRefused, match=reason):
        load_part(speaker, "float32", 2, Alone(), lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["llama", "mixtral"])
def test_ranks_that_are_joined_as_those_of_gpus_compute_the_same(arch: str, groups: Groups) -> None:
    """By torch.distributed, with batches whose columns go from device to device; here the devices are CPUs.

    193 tokens make unequal parts of the logits.
    """
    folder = groups.folder / "joined"
    folder.mkdir(exist_ok=True)
    path = tiny_model(arch, folder)
    with groups.group(path, 2, distributed=True) as (_, runner):
        assert_equal_tokens(path, runner, count=3)
