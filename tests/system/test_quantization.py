"""Served with int8 weights, greedy tokens are those of transformers with the same weights in float32."""

from __future__ import annotations

import concurrent.futures
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from interfaces import SamplingParams
from tests.model_worker.cpu.int8_reference import dequantized_model
from tests.model_worker.tiny_models import tiny_model
from tests.system.in_process import InProcessServer, Shape, load
from tests.system.server import Server
from tests.system.test_greedy_equality import EOS, NEW_TOKENS, mixed_prompts


def generate(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def parts_at_a_tie(model: Any, prompt: list[int], got: list[int], wanted: list[int]) -> bool:
    """Whether the first token that differs has the same logit in the reference, to float32's precision."""
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    if at is None:
        return False
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + wanted[:at]])).logits[0, -1]
    return abs(float(logits[got[at]] - logits[wanted[at]])) < 1e-5 * float(logits.std())


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gpt2", "mixtral"])
def test_greedy_tokens_equal_generate(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Blocks of 4 tokens run as modules, blocks of 16 as the fused stack where there is one."""
    seed = random.randrange(2**31)
    path = tiny_model(arch, tmp_path_factory.getbasetemp())
    prompts = mixed_prompts(seed)
    reference = dequantized_model(path)
    wanted = generate(reference, prompts, NEW_TOKENS)
    loaded = load(path, "int8")
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, stop_token_ids=[EOS])
    for block_size, num_blocks in ((4, 48), (16, 16)):
        server = InProcessServer(loaded, Shape(block_size=block_size, num_blocks=num_blocks))
        for prompt in prompts:
            server.submit(prompt, params)
        for prompt, answer, want in zip(prompts, server.run(), wanted, strict=True):
            same = answer.tokens == want or parts_at_a_tie(reference, prompt, answer.tokens, want)
            assert same, f"{arch}, seed {seed}, {block_size=}: {answer.tokens} instead of {want}"


def test_a_server_with_int8_weights(model: Path, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 400) for _ in range(rng.randint(2, 90))] for _ in range(12)]
    wanted = generate(dequantized_model(model), prompts, 24)
    flags = ["--quantization", "int8", "--dtype", "float32", "--kv-memory", "2MB"]
    with Server(model, flags, tmp_path / "log") as server, concurrent.futures.ThreadPoolExecutor(12) as pool:

        def ask(prompt: list[int]) -> Any:
            sampling = {"temperature": 0, "max_new_tokens": 24}
            return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})["output_ids"]

        assert list(pool.map(ask, prompts)) == wanted, f"seed {seed}"
