"""Guesses beside weights of every form, processors and adapters: they change no answer by a bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interfaces import SamplingParams, TextContext, TextGenerationInputs
from interfaces.request.sampling import LogprobMode
from model_worker.capacity import Capacity
from model_worker.loading.eagle3 import load_head
from model_worker.model import LoadedModel
from model_worker.sampling.registry import load_processors
from tests.model_worker.adapters.made import Recipe, make
from tests.model_worker.drafters.heads import PLAIN, random_weights, write_head
from tests.model_worker.drafters.oracle import Oracle
from tests.model_worker.pipelines.test_text import pipeline_of
from tests.model_worker.sampling.test_processors import FORMS, HERE
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, load
from tests.system.test_ahead import device_params, greedy_params, host_params
from tests.system.test_drafts import IN_STACK, Asked, check_equal, served

CAPACITY = Capacity(num_blocks=80, block_size=16, max_rows=16, max_model_len=72)


def check_guesses_change_nothing(loaded: LoadedModel, head_folder: Path, hidden: int) -> None:
    """Half of the oracle's guesses are right, and hardly any of a random head's."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    kinds = (greedy_params, greedy_params, device_params, host_params)
    prompts = [[3 + i, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 30)))] for i in range(10)]
    asked: Asked = [
        (prompt, replace(rng.choice(kinds)(rng), max_new_tokens=rng.randint(10, 30)), {}) for prompt in prompts
    ]
    plain = served(InProcessServer(loaded, IN_STACK), asked)
    texts = [prompt + answer.tokens for prompt, answer in zip(prompts, plain, strict=True)]
    source = write_head(head_folder, random_weights(3, target=hidden), PLAIN)
    head = load_head(source, loaded)
    for more in ({"drafters": [Oracle(texts, 0.5, VOCAB, seed)]}, {"drafters": [], "head": head}):
        server = InProcessServer(loaded, replace(IN_STACK, most_guesses=5, **more))
        check_equal(plain, served(server, asked), asked, seed)
        (engine,) = server.engines.values()
        assert engine.counters.drafted > 0


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int8")])
def test_weights_of_every_form(dtype: str, quantization: str, tmp_path: Path) -> None:
    loaded = load(tiny_model("llama", tmp_path / "model", seed=1), quantization, dtype)
    check_guesses_change_nothing(loaded, tmp_path / "head", 48)


def test_processors(tmp_path: Path) -> None:
    """Those that see all tokens so far, one row or all at once, and that replace logits: beside rows without any."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    processors = load_processors({name: f"{HERE}:{name}" for name in FORMS})
    asked: Asked = []
    for i in range(14):
        parameters = rng.choice([{}, {"ForRequest": '{"base": 20}'}, {"ForBatch": '{"base": 30}'}, {"Avoiding": "{}"}])
        values = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.getrandbits(64),
            max_new_tokens=rng.randint(10, 30),
            logprobs=LogprobMode.TEMPERED,
            named_processors=parameters,
        )
        asked.append(([3 + i, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 30)))], values, {}))
    shape = replace(IN_STACK, processors=processors)
    plain = served(InProcessServer(loaded, shape), asked)
    texts = [prompt + answer.tokens for (prompt, _, _), answer in zip(asked, plain, strict=True)]
    for chance in (0.5, 1.0):
        oracle = Oracle(texts, chance, VOCAB, seed)
        server = InProcessServer(loaded, replace(shape, most_guesses=5, drafters=[oracle]))
        check_equal(plain, served(server, asked), asked, seed)
        (engine,) = server.engines.values()
        assert engine.counters.accepted > 0


def test_adapters(tmp_path: Path) -> None:
    """Rows of two adapters and of none, with right and wrong guesses."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    path = tiny_model("llama", tmp_path / "model", seed=2)
    folders = [make(path, tmp_path / name, Recipe(rank=3 + i), seed=i).folder for i, name in enumerate("ab")]
    loaded = load(path)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, logprobs=LogprobMode.TEMPERED)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(9)]
    answers: list[Any] = []
    for guesses in (False, True):
        pipeline = pipeline_of(loaded, CAPACITY, most_guesses=3 if guesses else 0)
        for name, folder in zip("ab", folders, strict=True):
            pipeline.load_adapter(name, folder)
        contexts = [
            TextContext.from_prompt(prompt, params, adapter=("a", "b", "")[i % 3]) for i, prompt in enumerate(prompts)
        ]
        found: list[Any] = [[] for _ in contexts]
        while any(not context.is_done for context in contexts):
            for i, context in enumerate(contexts):
                known = answers[0][i] if guesses else []
                right = [token for token, _ in known][len(context.tokens) - len(prompts[i]) :]
                if guesses:
                    brought = [*right[: rng.randint(0, 4)], rng.randrange(VOCAB)]
                    context.spec_decoding_state.draft_tokens_to_verify = brought
            outputs = pipeline.execute(TextGenerationInputs([contexts], num_steps=6))
            for i, context in enumerate(contexts):
                output = outputs[context.request_id]
                logprobs = [entry.token_log_probabilities[0] for entry in output.log_probabilities or []]
                found[i] += list(zip(output.tokens, logprobs, strict=True))
        answers.append(found)
    assert answers[0] == answers[1], f"seed {seed}"
