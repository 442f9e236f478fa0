"""Hidden states, and prompts that are vectors, against a float32 forward of transformers, however work is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interfaces import SamplingParams
from model_worker.model import LoadedModel
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load

NEW_TOKENS = 12


def reference(loaded: LoadedModel, **inputs: torch.Tensor) -> Any:
    """Of transformers' own attention: what `lm_head` reads, and the logits."""
    model: Any = loaded.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(**inputs, output_hidden_states=True)
    model.set_attn_implementation(ours)
    return output


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3_moe"])
def test_hidden_states_equal_transformers(arch: str, tmp_path: Path) -> None:
    loaded = load(tiny_model(arch, tmp_path, seed=1))
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(20)]
    prompts = [shared[: rng.choice([0, 9, 20])] + [rng.randrange(3, VOCAB) for _ in range(9)] for _ in range(14)]
    shape = Shape(max_batch_tokens=rng.choice([7, 16, 32]), num_blocks=40, overlap=rng.random() < 0.5)
    server = InProcessServer(loaded, shape)
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
    for _ in range(2):  # the second time, prefixes are cached
        asked = [rng.random() < 0.6 for _ in prompts]
        handles = [server.submit(p, params, hidden_states=wanted) for p, wanted in zip(prompts, asked, strict=True)]
        for _ in range(rng.randrange(3, 12)):
            server.turn()
        assert server.scheduler.retract() > 0
        server.run()
        for handle, prompt, wanted in zip(handles, prompts, asked, strict=True):
            answer = server.answers[handle]
            tokens = prompt + answer.tokens
            assert sorted(answer.hidden) == (list(range(len(tokens) - 1)) if wanted else [])
            if wanted:
                expected = reference(loaded, input_ids=torch.tensor([tokens[:-1]])).hidden_states[-1][0]
                found = np.stack([answer.hidden[i] for i in range(len(tokens) - 1)])
                np.testing.assert_allclose(found, expected.numpy(), atol=1e-4, err_msg=f"seed {seed}, {shape}")
    assert all(worker.pool.used == 0 for worker in server.scheduler.workers.values())


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2"])
def test_a_prompt_of_vectors_is_read_as_transformers_reads_it(arch: str, tmp_path: Path) -> None:
    loaded = load(tiny_model(arch, tmp_path, seed=1))
    rng = np.random.default_rng()
    embedding: Any = loaded.model.get_input_embeddings()
    lengths = [int(rng.integers(1, 40)) for _ in range(9)]
    scale = float(embedding.weight.std())
    prompts = [rng.normal(0, scale, (n, embedding.weight.shape[1])).astype(np.float32) for n in lengths]
    prompts.append(prompts[0])
    server = InProcessServer(loaded, Shape(max_batch_tokens=16, num_blocks=40))
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
    for _ in range(2):  # the second time, prefixes are cached
        handles = [
            server.submit([0] * len(p), params, prompt_embeddings=p, cache_salt=str(hash(p.tobytes()))) for p in prompts
        ]
        server.submit([5, 6, 7], params)
        server.run()
        for handle, vectors in zip(handles, prompts, strict=True):
            answer = server.answers[handle]
            assert not answer.error
            given = torch.from_numpy(vectors)[None]
            for token in answer.tokens:
                logits = reference(loaded, inputs_embeds=given).logits[0, -1]
                assert logits[token] >= logits.max() - 1e-4
                given = torch.cat([given, embedding(torch.tensor([[token]])).detach()], 1)
    assert all(worker.pool.used == 0 for worker in server.scheduler.workers.values())


def test_vectors_of_the_embedding_are_the_tokens(tmp_path: Path) -> None:
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    prompt = [random.randrange(3, VOCAB) for _ in range(30)]
    embedding: Any = loaded.model.get_input_embeddings()
    vectors = embedding.weight.detach().numpy()[prompt].astype(np.float32)
    server = InProcessServer(loaded, Shape(num_blocks=400))
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
    plain = server.submit(prompt, params)
    given = server.submit([0] * 30, params, prompt_embeddings=vectors, cache_salt="x")
    server.run()
    assert server.answers[plain].tokens == server.answers[given].tokens


def test_vectors_of_another_width_are_refused(tmp_path: Path) -> None:
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    server = InProcessServer(loaded, Shape())
    for wrong in (np.zeros((3, 5), np.float32), np.full((3, 64), np.nan, np.float32)):
        handle = server.submit([0] * 3, SamplingParams(max_new_tokens=2), prompt_embeddings=wrong)
        server.run()
        assert "finite numbers" in server.answers[handle].error
