"""Guessing what follows, rightly or wrongly, changes no answer by a bit; it only takes fewer passes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy import embedded_model
from interfaces import Finish, SamplingParams
from model_worker.drafters import draft_model
from model_worker.drafters.suffix import EndedAnswers
from model_worker.grammar import mask_process
from model_worker.grammar.masks import Masks
from tests.api_server.constraints.vocabulary import EOS, compiled
from tests.model_worker.drafters.oracle import Oracle
from tests.model_worker.tiny_models import VOCAB, own_tiny_model, tiny_model
from tests.system.in_process import Answer, InProcessServer, Shape, load
from tests.system.test_ahead import device_params, greedy_params, host_params
from tests.system.test_sampled_stability import random_params

# The stack's blocks; too few of them for all rows at their longest.
ROOM = Shape(num_blocks=34, block_size=16, max_model_len=120)
IN_STACK = replace(ROOM, device_overlap="cpu")
WEIGHTS = Path(embedded_model.__file__).parent / "weights"

Asked = list[tuple[list[int], SamplingParams, dict[str, Any]]]
Params = Callable[[random.Random], SamplingParams]


def served(server: InProcessServer, asked: Asked) -> list[Answer]:
    for prompt, params, fields in asked:
        server.submit(prompt, params, **fields)
    return server.run()


def check_equal(plain: list[Answer], guessing: list[Answer], asked: Asked, seed: int) -> None:
    for one, other, (_, params, _) in zip(plain, guessing, asked, strict=True):
        assert one.tokens == other.tokens, f"seed {seed}"
        assert one.finished == other.finished
        assert one.error == other.error
        if params.logprobs:
            assert one.logprobs == other.logprobs
        assert one.reports == other.reports


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        (ROOM, (greedy_params, device_params, host_params, random_params)),
        (IN_STACK, (greedy_params, greedy_params, device_params, random_params)),
        (IN_STACK, (greedy_params,)),
        (replace(IN_STACK, learns=True), (greedy_params, device_params)),
    ],
)
def test_no_guess_changes_an_answer(shape: Shape, kinds: tuple[Params, ...], chance: float, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    # No two begin alike, so the oracle knows whose text it sees.
    prompts = [[3 + i, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 39)))] for i in range(20)]
    asked: Asked = [
        (prompt, replace(rng.choice(kinds)(rng), max_new_tokens=rng.randint(20, 60)), {}) for prompt in prompts
    ]
    plain = served(InProcessServer(loaded, shape), asked)
    texts = [prompt + answer.tokens for prompt, answer in zip(prompts, plain, strict=True)]
    oracle = Oracle(texts, chance, VOCAB, seed)
    server = InProcessServer(loaded, replace(shape, most_guesses=7, drafters=[oracle]))
    check_equal(plain, served(server, asked), asked, seed)
    (engine,) = server.engines.values()
    counters = engine.counters
    assert counters.drafted > 0 or shape.learns
    assert counters.accepted == sum(counters.accepted_at)
    if chance == 0.0:
        assert counters.accepted == 0
    elif not shape.learns:
        assert counters.accepted > 0
    if chance == 1.0:
        assert counters.accepted == counters.drafted
    assert {answer.finished for answer in plain} >= {Finish.LENGTH}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over the embedded model's tokens."""
    path = own_tiny_model("llama", tmp_path_factory.mktemp("model"), vocab_size=4096, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / name, path / name)
    return path


@pytest.fixture(scope="module")
def masks(model: Path) -> Iterator[Masks]:
    made = Masks(mask_process.fork_server(str(model), 16), 16, 4096)
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize("chance", [0.0, 0.8, 1.0])
def test_no_guess_changes_an_answer_with_a_grammar(model: Path, masks: Masks, chance: float) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    loaded = load(model)
    schema = {
        "type": "object",
        "properties": {"kind": {"const": "a value of many tokens"}, "count": {"type": "integer", "maximum": 99}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    grammars = [compiled("json_schema", schema), compiled("regex", r"([0-9]{3}-){2,9}x"), None]
    asked: Asked = []
    for i in range(9):
        values = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            seed=rng.randrange(2**64),
            max_new_tokens=40,
            stop_token_ids=[EOS],
        )
        grammar = grammars[i % 3]
        prompt = [3 + i, *(rng.randrange(3, 4096) for _ in range(rng.randint(0, 19)))]
        asked.append((prompt, values, {} if grammar is None else {"grammar": grammar}))
    plain = served(InProcessServer(loaded, ROOM, [masks]), asked)
    texts = [prompt + answer.tokens for (prompt, _, _), answer in zip(asked, plain, strict=True)]
    oracle = Oracle(texts, chance, 4096, seed)
    server = InProcessServer(loaded, replace(ROOM, most_guesses=5, drafters=[oracle]), [masks])
    check_equal(plain, served(server, asked), asked, seed)
    (engine,) = server.engines.values()
    assert engine.counters.drafted > 0
    assert (engine.counters.accepted > 0) == (chance > 0)


def test_nothing_is_guessed_where_a_row_depends_on_its_neighbours(tmp_path: Path) -> None:
    loaded = load(tiny_model("gemma2", tmp_path, seed=1))
    params = SamplingParams(temperature=0.0, max_new_tokens=30)
    asked: Asked = [([5, 6], params, {})]
    plain = served(InProcessServer(loaded, ROOM), asked)
    oracle = Oracle([[5, 6, *plain[0].tokens]], 1.0, VOCAB, 1)
    server = InProcessServer(loaded, replace(ROOM, most_guesses=7, drafters=[oracle]))
    check_equal(plain, served(server, asked), asked, 1)
    (engine,) = server.engines.values()
    assert engine.counters.drafted == 0


def model_that_goes_round(directory: Path) -> Path:
    """A token says what the next one is, whatever came before: soon one comes that came before."""
    path = own_tiny_model("llama", directory, seed=1)
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
        for token in (5, 6, 7):
            server.submit([token], params)
        answers.append([answer.tokens for answer in server.run()])
        (engine,) = server.engines.values()
        counters = engine.counters
        assert counters.accepted <= counters.drafted
        assert counters.accepted > 120 if most_guesses else counters.drafted == 0
    assert answers[0] == answers[1] == answers[2]
    assert [len(tokens) for tokens in answers[0]] == [100] * 3


@pytest.mark.parametrize("same", [True, False])
def test_no_guess_of_a_draft_model_changes_an_answer(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is the model itself, with the row's noise, is always right: also about prompts found in the cache."""
    monkeypatch.setattr(draft_model, "CAUGHT_UP_AT_ONCE", 20)
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    loaded = load(tiny_model("llama", tmp_path / "model", seed=1))
    draft = load(tiny_model("llama", tmp_path / "draft", seed=1 if same else 2))
    begin = [rng.randrange(3, VOCAB) for _ in range(34)]
    kinds = (greedy_params, device_params) if same else (greedy_params, device_params, host_params, random_params)
    asked: Asked = []
    for i in range(12):
        prompt = [*(begin if i % 2 else []), 3 + i, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 30)))]
        asked.append((prompt, replace(rng.choice(kinds)(rng), max_new_tokens=rng.randint(10, 40)), {}))
    plain = served(InProcessServer(loaded, IN_STACK), asked)
    server = InProcessServer(loaded, replace(IN_STACK, most_guesses=7, drafters=[], draft=draft))
    check_equal(plain, served(server, asked), asked, seed)
    (engine,) = server.engines.values()
    assert engine.counters.drafted > 0
    assert not same or engine.counters.accepted == engine.counters.drafted


def test_an_answer_that_comes_again_takes_fewer_passes(tmp_path: Path) -> None:
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    server = InProcessServer(loaded, replace(IN_STACK, most_guesses=7, drafters=[EndedAnswers()]))
    steps = []
    for _ in range(4):
        server.submit([5, 6, 7], params)
        before = server.scheduler.workers[0].in_flight.answered
        server.run()
        steps.append(server.scheduler.workers[0].in_flight.answered - before)
    answers = [answer.tokens for answer in server.run()]
    assert answers == [answers[0]] * 4
    assert steps[0] >= 60
    assert steps[-1] < 30
