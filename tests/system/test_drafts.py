"""Guessing what follows, rightly or wrongly, changes no token; it only takes fewer passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from interfaces import Finish, SamplingParams
from model_worker.execution import speculation
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import Answer, InProcessServer, Shape, load
from tests.system.test_ahead import device_params, greedy_params, host_params

ROOM = Shape(num_blocks=40, block_size=16, max_model_len=120)
IN_STACK = replace(ROOM, device_overlap="cpu")
OUTLASTING = SamplingParams(temperature=0.0, max_new_tokens=80, ignore_eos=True)

Asked = list[tuple[list[int], SamplingParams]]


def answers_of(server: InProcessServer, asked: Asked, together: int) -> list[Answer]:
    """So many at a time; those that stay longer are by themselves at the end."""
    for start in range(0, len(asked), together):
        for prompt, params in asked[start : start + together]:
            server.submit(prompt, params)
        server.run()
    return server.run()


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize(
    ("architecture", "shape", "kinds"),
    [
        ("olmo2", ROOM, (greedy_params, device_params, host_params)),
        ("llama", ROOM, (greedy_params, device_params, host_params)),
        ("llama", IN_STACK, (greedy_params, device_params)),
        ("gemma2", ROOM, (greedy_params, device_params)),
    ],
)
def test_no_guess_changes_a_token(
    architecture: str,
    shape: Shape,
    kinds: tuple[Callable[[random.Random], SamplingParams], ...],
    together: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    loaded = load(tiny_model(architecture, tmp_path, seed=1))
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(24)]
    asked = [(prompt, replace(rng.choice(kinds)(rng), max_new_tokens=rng.randint(10, 60))) for prompt in prompts]
    if together > 1:  # one of them has to be by itself in the end, or nothing would be guessed
        asked[::together] = [(prompt, OUTLASTING) for prompt, _ in asked[::together]]
    plain = answers_of(InProcessServer(loaded, shape), asked, together)
    texts = [prompt + answer.tokens for prompt, answer in zip(prompts, plain, strict=True)]

    def half_right(tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """What will follow, up to where it is wrong."""
        known = tokens.tolist()
        following = next((text[len(known) :] for text in texts if text[: len(known)] == known), [])
        guessed = [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in following]
        return np.array(guessed[: rng.randint(0, most)], np.int32)

    monkeypatch.setattr(speculation, "draft", half_right)
    server = InProcessServer(loaded, replace(shape, most_guesses=7))
    guessing = answers_of(server, asked, together)
    for one, other in zip(plain, guessing, strict=True):
        assert one.tokens == other.tokens, f"seed {seed}"
        assert one.finished == other.finished
    (engine,) = server.engines.values()
    assert 0 < engine.counters.accepted < engine.counters.drafted, "some were meant to be right, and some wrong"
    assert {answer.finished for answer in plain} == {Finish.STOP, Finish.LENGTH}


def model_that_goes_round(directory: Path) -> Path:
    """A token says what the next one is, whatever came before: soon one comes that came before."""
    path = tiny_model("llama", directory, seed=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(weight)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize("shape", [ROOM, IN_STACK])
def test_a_text_that_repeats_itself_takes_fewer_passes(shape: Shape, temperature: float, tmp_path: Path) -> None:
    loaded = load(model_that_goes_round(tmp_path))
    params = SamplingParams(temperature=temperature, max_new_tokens=100)
    answers = []
    for most_guesses in (0, 3, 7):
        server = InProcessServer(loaded, replace(shape, most_guesses=most_guesses))
        server.submit([5], params)
        (answer,) = server.run()
        answers.append(answer.tokens)
        (engine,) = server.engines.values()
        counters = engine.counters
        assert counters.accepted <= counters.drafted
        assert counters.accepted > 40 if most_guesses else counters.drafted == 0
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 100
