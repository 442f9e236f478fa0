"""Guesses that contexts bring, or that a pipeline makes, take fewer passes and change no token."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from interfaces import (
    BatchProcessorInputs,
    GenerationStatus,
    ProcessorInputs,
    SamplingParams,
    TextContext,
    TextGenerationInputs,
)
from interfaces.request.sampling import LogprobMode
from model_worker.capacity import Capacity
from model_worker.drafters.pass_times import PassTimes
from model_worker.engine import Engine
from model_worker.model import LoadedModel
from model_worker.pipelines.text import TextPipeline
from tests.model_worker.pipelines.test_text import context, mixed_params, pipeline_of, random_prompt, run
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import load
from tests.system.test_drafts import model_that_goes_round

# Blocks that the fused stack takes.
CAPACITY = Capacity(num_blocks=80, block_size=16, max_rows=16, max_model_len=72)
LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_new_tokens=LENGTH, logprobs=LogprobMode.TEMPERED, top_logprobs=2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of all steps."""
    found: list[int] = []
    plain = Engine.step

    def step(self: Engine, asked: object) -> object:
        found.append(len(asked.rows))  # type: ignore[attr-defined]
        return plain(self, asked)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "step", step)
    return found


def answer_of(pipeline: TextPipeline, asked: TextContext, num_steps: int = LENGTH) -> list[int]:
    output = pipeline.execute(TextGenerationInputs([[asked]], num_steps=num_steps))[asked.request_id]
    return output.tokens


def test_right_guesses_take_one_pass(loaded: LoadedModel, steps: list[int]) -> None:
    prompt = random_prompt(random.Random(1), 9)
    plain = context(prompt, GREEDY)
    wanted = answer_of(pipeline_of(loaded, CAPACITY), plain)
    assert len(steps) == LENGTH
    pipeline = pipeline_of(loaded, CAPACITY)
    asked = context(prompt, GREEDY)
    got = answer_of(pipeline, asked, 1)
    asked.spec_decoding_state.draft_tokens_to_verify = list(wanted[1:])
    steps.clear()
    got += answer_of(pipeline, asked)
    assert got == wanted
    assert len(steps) == 1
    assert asked.spec_decoding_state.maybe_accepted_draft_tokens == wanted[1:]
    assert asked.spec_decoding_state.draft_tokens_to_verify == []
    assert asked.status is GenerationStatus.MAXIMUM_LENGTH
    assert asked.to_generation_output().final_status is GenerationStatus.MAXIMUM_LENGTH


def test_guesses_hold_up_to_the_first_wrong_one_and_no_further_than_asked(loaded: LoadedModel) -> None:
    prompt = random_prompt(random.Random(2), 9)
    wanted = answer_of(pipeline_of(loaded, CAPACITY), context(prompt, GREEDY))
    pipeline = pipeline_of(loaded, CAPACITY)
    asked = context(prompt, GREEDY)
    state = asked.spec_decoding_state
    # Of a prompt's step nothing is verified, and guesses that hold stay.
    state.draft_tokens_to_verify = [*wanted[:6], (wanted[6] + 1) % VOCAB, wanted[7]]
    assert answer_of(pipeline, asked, 1) == wanted[:1]
    assert state.maybe_accepted_draft_tokens == wanted[:1]
    assert answer_of(pipeline, asked, 3) == wanted[1:4]
    assert state.maybe_accepted_draft_tokens == wanted[1:4]
    assert answer_of(pipeline, asked, 6) == wanted[4:10]
    assert state.maybe_accepted_draft_tokens == wanted[4:6]
    assert state.draft_tokens_to_verify == []
    assert answer_of(pipeline, asked) == wanted[10:]
    assert state.maybe_accepted_draft_tokens == []
    pipeline.release(asked.request_id)
    assert pipeline.free_blocks == CAPACITY.num_blocks


def test_no_guess_changes_a_token_or_log_probability(loaded: LoadedModel) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(1, 30)) for _ in range(12)]
    params = [mixed_params(rng) for _ in prompts]
    plain = [context(prompt, values) for prompt, values in zip(prompts, params, strict=True)]
    guessed = [context(prompt, values) for prompt, values in zip(prompts, params, strict=True)]
    expected = pipeline_of(loaded, CAPACITY).execute(TextGenerationInputs([plain], num_steps=72))
    pipeline = pipeline_of(loaded, CAPACITY, most_guesses=3)
    found: list[list[int]] = [[] for _ in prompts]
    while any(not one.is_done for one in guessed):
        for one, before in zip(guessed, plain, strict=True):
            answer = before.tokens.all[len(one.tokens) :].tolist()
            right = answer[: rng.randint(0, 5)]
            one.spec_decoding_state.draft_tokens_to_verify = [*right, rng.randrange(VOCAB)]
        outputs = pipeline.execute(TextGenerationInputs([guessed], num_steps=rng.randint(1, 8)))
        for one, tokens in zip(guessed, found, strict=True):
            tokens += outputs[one.request_id].tokens
    for one, before, tokens in zip(guessed, plain, found, strict=True):
        assert tokens == expected[before.request_id].tokens, f"seed {seed}"
        assert one.status is before.status
        assert one.tokens.all.tolist() == before.tokens.all.tolist()


def test_log_probabilities_come_with_each_guessed_token(loaded: LoadedModel) -> None:
    prompt = random_prompt(random.Random(3), 9)
    plain = context(prompt, GREEDY)
    expected = pipeline_of(loaded, CAPACITY).execute(TextGenerationInputs([[plain]], num_steps=LENGTH))
    pipeline = pipeline_of(loaded, CAPACITY)
    asked = context(prompt, GREEDY)
    answer = plain.tokens.all[len(prompt) :].tolist()
    asked.spec_decoding_state.draft_tokens_to_verify = answer
    found = pipeline.execute(TextGenerationInputs([[asked]], num_steps=LENGTH))
    assert found[asked.request_id].log_probabilities == expected[plain.request_id].log_probabilities


def test_an_end_among_guesses_ends_and_the_text_may_go_on(loaded: LoadedModel) -> None:
    prompt = random_prompt(random.Random(4), 9)
    wanted = answer_of(pipeline_of(loaded, CAPACITY), context(prompt, GREEDY))
    end = wanted[3]
    until = wanted.index(end) + 1
    pipeline = pipeline_of(loaded, CAPACITY)
    asked = context(prompt, replace(GREEDY, stop_token_ids=[end]))
    answer_of(pipeline, asked, 1)
    asked.spec_decoding_state.draft_tokens_to_verify = list(wanted[1:])
    answer_of(pipeline, asked)
    assert asked.tokens.all[len(prompt) :].tolist() == wanted[:until]
    assert asked.status is GenerationStatus.END_OF_SEQUENCE
    asked.eos_tracker.eos_token_ids.clear()
    asked.status = GenerationStatus.ACTIVE
    answer_of(pipeline, asked)
    assert asked.tokens.all[len(prompt) :].tolist() == wanted


def test_a_text_that_repeats_itself_takes_fewer_passes(steps: list[int], tmp_path: Path) -> None:
    loaded = load(model_that_goes_round(tmp_path))
    counts = []
    answers = []
    for most in (0, 4):
        steps.clear()
        pipeline = pipeline_of(loaded, CAPACITY, most_guesses=most)
        params = SamplingParams(temperature=0, max_new_tokens=60)
        answers.append(run(pipeline, [context([token], params) for token in (5, 6, 7)], 60))
        counts.append(len(steps))
    assert answers[0] == answers[1]
    assert counts[0] == 60
    assert counts[1] < 40


def test_with_auto_a_text_that_repeats_itself_takes_fewer_passes_where_these_cost_nothing(
    steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def equal_times(self: PassTimes, least: int, most: int) -> NDArray[np.float64]:
        return np.ones(most - least + 1)

    loaded = load(model_that_goes_round(tmp_path))
    params = SamplingParams(temperature=0, max_new_tokens=60)
    prompts = [[token] for token in (5, 6, 7)]
    wanted = run(pipeline_of(loaded, CAPACITY), [context(prompt, params) for prompt in prompts], 60)
    monkeypatch.setattr(PassTimes, "seconds", equal_times)
    pipeline = pipeline_of(loaded, CAPACITY, most_guesses=4, learns=True)
    steps.clear()
    assert run(pipeline, [context(prompt, params) for prompt in prompts], 60) == wanted
    assert len(steps) < 45


def test_processors_see_one_row_of_each_request(loaded: LoadedModel) -> None:
    """So nothing is guessed beside them, and what they do is done."""
    seen: list[tuple[int, ...]] = []

    def own(inputs: ProcessorInputs) -> None:
        seen.append(tuple(inputs.logits.shape))
        inputs.logits[0, 7] = 1e6

    def every(inputs: BatchProcessorInputs) -> None:
        seen.append(tuple(inputs.logits.shape))
        inputs.logits[:, 7] = 1e6

    values = SamplingParams(temperature=0, max_new_tokens=4)
    for params, processors in ((replace(values, logits_processors=[own]), []), (values, [every])):
        pipeline = pipeline_of(loaded, CAPACITY, most_guesses=3, batch_processors=processors)
        asked = context([7, 7, 7, 7, 7], params)
        asked.spec_decoding_state.draft_tokens_to_verify = [7, 7, 7]
        assert answer_of(pipeline, asked) == [7, 7, 7, 7]
    assert set(seen) == {(1, VOCAB)}


@pytest.mark.parametrize("guess", [-1, VOCAB])
def test_a_guess_that_is_no_token_is_refused(loaded: LoadedModel, guess: int) -> None:
    asked = context([3, 4], GREEDY)
    asked.spec_decoding_state.draft_tokens_to_verify = [5, guess]
    with pytest.raises(ValueError, match=f"has the guess {guess}: the model has tokens 0 to {VOCAB - 1}"):
        answer_of(pipeline_of(loaded, CAPACITY), asked)


@pytest.mark.parametrize("speculate", [-1, "many"])
def test_what_is_no_number_of_guesses_is_refused(speculate: int | str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"speculate must be auto, or a number of tokens, 0 for none, got {speculate}"):
        TextPipeline.load(tmp_path, speculate=speculate)
