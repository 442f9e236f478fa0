"""Offline text generation: the tokens of `generate` and of the server, whatever the steps and the batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interfaces import (
    BatchProcessorInputs,
    EOSTracker,
    GenerationStatus,
    Pipeline,
    PipelineTokenGenerator,
    ProcessorInputs,
    RequestID,
    SamplingParams,
    TextContext,
    TextGenerationInputs,
    TextGenerationOutput,
    TokenBuffer,
    TokenGenerator,
)
from interfaces.request.sampling import LogprobMode
from model_worker.capacity import Capacity
from model_worker.model import LoadedModel
from model_worker.pipelines.text import TextPipeline
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load
from tests.system.test_greedy_equality import EOS, NEW_TOKENS, mixed_prompts, reference

CAPACITY = Capacity(num_blocks=400, block_size=4, max_rows=16, max_model_len=72)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("models")))


def pipeline_of(loaded: LoadedModel, capacity: Capacity = CAPACITY, **more: Any) -> TextPipeline:
    runner = ModelRunner(loaded, capacity.num_blocks, capacity.block_size)
    return TextPipeline(runner, capacity, **{"max_batch_tokens": 32, **more})


def context(prompt: list[int], params: SamplingParams | None = None, **more: Any) -> TextContext:
    params = params or SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, stop_token_ids=[EOS])
    most = params.max_new_tokens
    return TextContext(
        tokens=TokenBuffer(np.array(prompt, np.int64)),
        max_length=None if most is None else len(prompt) + most,
        sampling_params=params,
        eos_tracker=EOSTracker(eos_token_ids=set(params.stop_token_ids or ())),
        **more,
    )


def run(pipeline: TextPipeline, contexts: list[TextContext], num_steps: int) -> list[list[int]]:
    """Tokens of each context, as outputs tell them, until all have ended; everything is released."""
    found: dict[RequestID, list[int]] = {each.request_id: [] for each in contexts}
    running = list(contexts)
    while running:
        outputs = pipeline.next_token(
            TextGenerationInputs(batch={c.request_id: c for c in running}, num_steps=num_steps)
        )
        for each in running:
            output = outputs[each.request_id]
            assert output.is_done is each.is_done
            found[each.request_id] += output.tokens
        running = [each for each in running if not each.is_done]
    for each in contexts:
        pipeline.release(each.request_id)
    return list(found.values())


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("num_steps", [1, 8, 100])
def test_greedy_tokens_equal_generate(loaded: LoadedModel, num_steps: int) -> None:
    seed = random.randrange(2**31)
    prompts = mixed_prompts(seed)
    pipeline = pipeline_of(loaded)
    tokens = run(pipeline, [context(prompt) for prompt in prompts], num_steps)
    assert tokens == reference(loaded, prompts), f"seed {seed}"
    assert pipeline.free_blocks == CAPACITY.num_blocks


def mixed_params(rng: random.Random) -> SamplingParams:
    """Greedy and sampled values of every kind, as a server would get them."""
    common: dict[str, Any] = {
        "seed": rng.getrandbits(64),
        "max_new_tokens": rng.randint(1, NEW_TOKENS),
        "stop_token_ids": rng.choice([[], [EOS], [EOS, 50, 51, 52]]),
        "logprobs": rng.choice([LogprobMode.NONE, LogprobMode.TEMPERED, LogprobMode.WARPED]),
    }
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": rng.uniform(0.3, 2), "top_k": rng.randint(2, 40)},
        {"temperature": rng.uniform(0.3, 2), "top_p": rng.uniform(0.2, 1), "min_p": 0.01},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.4, "penalize_prompt": rng.random() < 0.5},
        {"temperature": 0.0, "min_new_tokens": 1, "logit_bias": {EOS: 8.0}},
    ]
    return SamplingParams(**common, **rng.choice(kinds))


def test_a_mixed_batch_has_the_servers_tokens_and_log_probabilities(loaded: LoadedModel) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    prompts = mixed_prompts(seed)
    params = [mixed_params(rng) for _ in prompts]
    server = InProcessServer(loaded, Shape())
    for prompt, values in zip(prompts, params, strict=True):
        server.submit(prompt, values)
    answers = server.run()

    contexts = [context(prompt, values) for prompt, values in zip(prompts, params, strict=True)]
    pipeline = pipeline_of(loaded)
    inputs = TextGenerationInputs([contexts[:7], contexts[7:]], num_steps=NEW_TOKENS)
    outputs = list(pipeline.execute(inputs).values())
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers], f"seed {seed}"
    for values, output, answer in zip(params, outputs, answers, strict=True):
        if values.logprobs == LogprobMode.NONE:
            assert output.log_probabilities is None
            continue
        assert output.log_probabilities is not None
        found = [entry.token_log_probabilities for entry in output.log_probabilities]
        assert np.allclose(np.concatenate(found), answer.logprobs, atol=1e-4), f"seed {seed}"


@pytest.mark.parametrize("most", [1, 5])
def test_log_probabilities_are_the_models(loaded: LoadedModel, most: int) -> None:
    prompt = random_prompt(random.Random(random.getrandbits(64)), 9)
    asked = context(prompt, SamplingParams(temperature=0, max_new_tokens=4), log_probabilities=most)
    output = pipeline_of(loaded).execute(TextGenerationInputs([[asked]], num_steps=4))[asked.request_id]
    ids = torch.tensor([prompt + output.tokens])
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids).logits[0].float().log_softmax(-1)
    assert output.log_probabilities is not None
    for i, (token, entry) in enumerate(zip(output.tokens, output.log_probabilities, strict=True)):
        expected = float(logits[len(prompt) + i - 1, token])
        assert entry.token_log_probabilities == [pytest.approx(expected, abs=1e-3)]
        top = entry.top_log_probabilities[0]
        assert next(iter(top.items())) == (token, entry.token_log_probabilities[0])
        wanted = logits[len(prompt) + i - 1].topk(most)
        assert list(top.values()) == pytest.approx(wanted.values.tolist(), abs=1e-3)


def test_requests_may_come_and_go_between_steps(loaded: LoadedModel) -> None:
    rng = random.Random(random.getrandbits(64))
    prompts = [random_prompt(rng, rng.randint(1, 30)) for _ in range(24)]
    wanted = reference(loaded, prompts)
    pipeline = pipeline_of(loaded, Capacity(num_blocks=90, block_size=4, max_rows=5, max_model_len=72))
    waiting = list(enumerate(context(prompt) for prompt in prompts))
    running: list[tuple[int, TextContext]] = []
    found: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    while waiting or running:
        while waiting and len(running) < 5:
            running.append(waiting.pop())
        rng.shuffle(running)
        batch = running[: rng.randint(1, 5)]
        outputs = pipeline.execute(TextGenerationInputs([[each for _, each in batch]], num_steps=rng.randint(1, 5)))
        for i, each in batch:
            found[i] += outputs[each.request_id].tokens
            if each.is_done:
                pipeline.release(each.request_id)
        running = [(i, each) for i, each in running if not each.is_done]
    assert [found[i] for i in range(len(prompts))] == wanted
    assert pipeline.free_blocks == 90


def test_contexts_may_be_reset_rolled_back_and_released_in_between(loaded: LoadedModel) -> None:
    rng = random.Random(random.getrandbits(64))
    prompt = random_prompt(rng, 21)
    params = SamplingParams(temperature=1.0, seed=rng.getrandbits(64), max_new_tokens=NEW_TOKENS)
    (wanted,) = run(pipeline_of(loaded), [context(prompt, params)], NEW_TOKENS)

    pipeline, changed = pipeline_of(loaded), context(prompt, params)
    one = TextGenerationInputs([[changed]], num_steps=3)
    pipeline.execute(one)
    changed.reset()
    pipeline.execute(one)
    changed.drop_last_tokens(2)
    pipeline.execute(one)
    pipeline.release(changed.request_id)
    pipeline.execute(TextGenerationInputs([[changed]], num_steps=NEW_TOKENS))
    assert changed.tokens.all[len(prompt) :].tolist() == wanted


def test_a_forced_token_is_computed_with_the_next_step(loaded: LoadedModel) -> None:
    prompt = random_prompt(random.Random(random.getrandbits(64)), 10)
    pipeline = pipeline_of(loaded)
    forced = context(prompt)
    pipeline.execute(TextGenerationInputs([[forced]], num_steps=2))
    forced.append_forced_token(77)
    forced.append_forced_token(78)
    pipeline.execute(TextGenerationInputs([[forced]], num_steps=3))
    known = forced.tokens.all.tolist()
    (wanted,) = reference(loaded, [known[: len(prompt) + 4]])
    assert known[len(prompt) + 4 :] == wanted[:3]


def test_a_chunked_context_takes_one_chunk_a_step_and_gets_no_token_for_it(loaded: LoadedModel) -> None:
    prompt = random_prompt(random.Random(random.getrandbits(64)), 20)
    pipeline, chunked = pipeline_of(loaded), context(prompt)
    chunked.tokens.chunk(8)
    first = pipeline.execute(TextGenerationInputs([[chunked]], num_steps=1))[chunked.request_id]
    assert (first.tokens, chunked.tokens.processed_length) == ([], 8)
    assert pipeline.free_blocks == CAPACITY.num_blocks - 2
    (wanted,) = reference(loaded, [prompt])
    assert run(pipeline, [chunked], 4) == [wanted]


def test_release_frees_blocks_and_rows_and_may_be_repeated(loaded: LoadedModel) -> None:
    pipeline = pipeline_of(loaded)
    held = context(random_prompt(random.Random(random.getrandbits(64)), 10))
    pipeline.execute(TextGenerationInputs([[held]], num_steps=1))
    assert pipeline.free_blocks == CAPACITY.num_blocks - 3
    pipeline.release(held.request_id)
    pipeline.release(held.request_id)
    assert pipeline.free_blocks == CAPACITY.num_blocks


def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(loaded: LoadedModel) -> None:
    pipeline = pipeline_of(loaded, Capacity(num_blocks=8, block_size=4, max_rows=2, max_model_len=32))
    prompts = [random_prompt(random.Random(i), 9) for i in range(3)]
    three = [context(prompt) for prompt in prompts]
    with pytest.raises(ValueError, match="3 new requests, and 2 of 2 rows are free"):
        pipeline.execute(TextGenerationInputs([three]))
    with pytest.raises(ValueError, match="needs 14 more KV blocks, and 8 of 8 are free"):
        pipeline.execute(TextGenerationInputs([three[:2]], num_steps=NEW_TOKENS))
    assert pipeline.free_blocks == 8
    assert all(each.is_initial_prompt for each in three)
    assert run(pipeline, three[:1], 30) == reference(loaded, prompts[:1])


@pytest.mark.parametrize(
    ("prompt", "more", "why"),
    [
        ([3] * 72, {}, "at most 71 leave room"),
        ([3, VOCAB], {}, f"from 3 to {VOCAB}"),
        ([3, -999], {}, "from -999 to 3"),
        ([3], {"json_schema": "{}"}, "a schema, which is not compiled: let TextTokenizer"),
        ([3], {"grammar": 'start: "a"'}, "made without masks"),
        ([3], {"log_probabilities": 65}, "must be 0 to 64"),
        ([3], {"hidden_states": True}, "no vectors"),
        ([3], {"log_probabilities": 1, "log_probabilities_echo": True}, "without echo"),
    ],
)
def test_what_cannot_be_done_is_refused(loaded: LoadedModel, prompt: list[int], more: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pipeline_of(loaded).execute(TextGenerationInputs([[context(prompt, **more)]]))


def test_a_request_that_fails_fails_alone(loaded: LoadedModel) -> None:
    rng = random.Random(random.getrandbits(64))
    prompt = random_prompt(rng, 5)
    good = context(prompt)
    bad = context(random_prompt(rng, 5), SamplingParams(temperature=0, max_new_tokens=5, logit_bias={VOCAB + 7: 1.0}))
    pipeline = pipeline_of(loaded)
    with pytest.raises(ValueError, match=f"request {bad.request_id}: logit_bias names tokens"):
        pipeline.execute(TextGenerationInputs([[bad, good]], num_steps=4))
    assert bad.status is GenerationStatus.CANCELLED
    assert run(pipeline, [good], 5) == reference(loaded, [prompt])
    assert pipeline.free_blocks == CAPACITY.num_blocks


def test_the_pipeline_ends_what_has_no_length_of_its_own(loaded: LoadedModel) -> None:
    endless = context(random_prompt(random.Random(random.getrandbits(64)), 4), SamplingParams(temperature=0))
    (tokens,) = run(pipeline_of(loaded), [endless], 7)
    assert len(tokens) == CAPACITY.max_model_len - 4
    assert endless.status is GenerationStatus.MAXIMUM_LENGTH


def test_a_pass_looks_for_contexts_only_where_there_are_processors(loaded: LoadedModel) -> None:
    pipeline = pipeline_of(loaded)
    looked: list[Any] = []
    logits: Any = pipeline._logits
    contexts_of = logits._sampling_in

    def look(batch: Any) -> Any:
        looked.append(batch)
        return contexts_of(batch)

    logits._sampling_in = look
    free = SamplingParams(temperature=0, max_new_tokens=2)
    run(pipeline, [context([5, 6], free)], 2)
    assert not looked
    run(pipeline, [context([5, 6], replace(free, logits_processors=[lambda inputs: None]))], 2)
    assert len(looked) == 2


def test_processors_change_logits_in_place_the_pipelines_before_the_requests(loaded: LoadedModel) -> None:
    seen: list[tuple[str, Any, tuple[int, ...]]] = []

    def force(token: int, inputs: ProcessorInputs) -> None:
        seen.append(("own", inputs.context.request_id, tuple(inputs.logits.shape)))
        assert inputs.logits.dtype == torch.float32
        inputs.logits[-1, token] = 1e6

    def apply_masks(inputs: BatchProcessorInputs) -> None:
        seen.append(("batch", len(inputs.context_batch), tuple(inputs.logits.shape)))
        inputs.logits[:, 5] = -torch.inf

    own = SamplingParams(temperature=0, max_new_tokens=2, logits_processors=[lambda inputs: force(9, inputs)])
    free = replace(own, logits_processors=None, logit_bias={5: 1e5})
    contexts = [context([4, 6], own), context([4, 6], free)]
    tokens = run(pipeline_of(loaded, batch_processors=[apply_masks]), contexts, 2)
    assert tokens[0] == [9, 9]
    assert 5 not in tokens[1]
    assert seen[:2] == [("batch", 2, (2, VOCAB)), ("own", contexts[0].request_id, (1, VOCAB))]


def test_it_is_a_pipeline_and_a_token_generator(loaded: LoadedModel) -> None:
    pipeline = pipeline_of(loaded)
    assert isinstance(pipeline, Pipeline)
    assert isinstance(pipeline, TokenGenerator)
    assert pipeline.max_batch_size == 16
    prompt = random_prompt(random.Random(random.getrandbits(64)), 6)
    first, second = context(prompt), context(prompt)
    direct: TextGenerationOutput = pipeline.execute(TextGenerationInputs([[first]], num_steps=5))[first.request_id]
    adapted = PipelineTokenGenerator(pipeline)
    assert adapted.next_token(TextGenerationInputs([[second]], num_steps=5))[second.request_id].tokens == direct.tokens
    adapted.release(second.request_id)


def test_load_takes_a_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tiny_model("llama", tmp_path_factory.mktemp("models"))
    pipeline = TextPipeline.load(path, dtype="float32", max_batch_size=2, max_length=64, kv_memory=1 << 20)
    assert (pipeline.max_length, pipeline.free_blocks) == (64, 8)
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 512 positions, got 600"):
        TextPipeline.load(path, max_length=600)
