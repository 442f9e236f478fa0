"""Greedy text with guesses is what transformers' own speculation gives, with a small model and by the prompt."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from interfaces import SamplingParams
from model_worker.drafters.own_text import OwnText
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load
from tests.system.test_drafts import IN_STACK

LENGTH = 40


def generated(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """What transformers generates; `options` say how it guesses."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def ours(loaded: Any, prompts: list[list[int]], shape: Shape) -> tuple[list[list[int]], int]:
    server = InProcessServer(loaded, shape)
    params = SamplingParams(temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True)
    for prompt in prompts:
        server.submit(prompt, params)
    found = [answer.tokens for answer in server.run()]
    (engine,) = server.engines.values()
    return found, engine.counters.accepted


def test_a_small_model_and_the_prompt_guess_as_transformers_do(tmp_path: Path) -> None:
    """The small model is the served one with its numbers changed a little, so that some guesses are right."""
    path = tiny_model("llama", tmp_path / "model", seed=1)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assistant: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=noise) if weight.dim() > 1 else 0
    assistant.save_pretrained(tmp_path / "assistant")
    rng = random.Random(11)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 12))] * rng.randint(1, 3) for _ in range(6)]
    with_assistant = generated(model, prompts, assistant_model=assistant)
    with_lookup = generated(model, prompts, prompt_lookup_num_tokens=4)
    loaded = load(path)
    by_model, right = ours(
        loaded, prompts, replace(IN_STACK, most_guesses=5, drafters=[], draft=load(tmp_path / "assistant"))
    )
    assert by_model == with_assistant
    assert right > 0
    by_text, _ = ours(loaded, prompts, replace(IN_STACK, most_guesses=4, drafters=[OwnText()]))
    assert by_text == with_lookup
    assert by_text == by_model
