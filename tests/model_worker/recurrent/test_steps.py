"""Recurrent states under everything that begins, repeats or gives up steps, and what refuses a model that has them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interfaces import BatchProcessorInputs, SamplingParams, TextGenerationInputs
from model_worker.capacity import Capacity
from model_worker.loading.draft import load_guesser
from model_worker.model import LoadedModel, ModelRefused
from model_worker.pipelines.text import TextPipeline
from model_worker.runner import ModelRunner
from model_worker.tensor_parallel.load import load_part
from tests.model_worker.pipelines.test_text import context
from tests.model_worker.recurrent.test_hybrids import one
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.model_worker.test_runner import BLOCK_SIZE
from tests.model_worker.tiny_models import VOCAB
from tests.system.in_process import InProcessServer, Shape, load
from tests.system.served_model import make_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_hybrid("qwen3_5_text", tmp_path_factory.getbasetemp()))


def drawn(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def test_steps_that_are_launched_ahead_and_given_up_change_no_state_that_goes_on(loaded: LoadedModel) -> None:
    """Rows end while a step is in flight that computes them once more, and their rows go to others."""
    asked = [
        (drawn(random.randint(1, 30)), SamplingParams(temperature=1.0, seed=i, max_new_tokens=random.randint(1, 18)))
        for i in range(16)
    ]
    answers = []
    for shape in (
        Shape(num_blocks=400, overlap=False),
        Shape(num_blocks=18, max_rows=5, device_overlap="cuda"),
        Shape(num_blocks=18, max_rows=5, max_batch_tokens=9),
    ):
        server = InProcessServer(loaded, shape)
        for prompt, params in asked:
            server.submit(prompt, params)
        answers.append([answer.tokens for answer in server.run()])
    assert len({tuple(tokens) for tokens in answers[0]}) > 12
    assert answers[1:] == answers[:1] * 2, asked


def test_memory_that_was_given_back_holds_no_state(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded, 32, BLOCK_SIZE)
    text = drawn(20)
    runner.backend.logits(one(text[:12], 0, 1))
    runner.cache.release()
    runner.cache.restore()
    with pytest.raises(RuntimeError, match="row 1 goes on behind 12 tokens, and its recurrent state stands for 0"):
        runner.backend.logits(one(text, 12, 1))
    again = runner.backend.logits(one(text, 0, 1)).clone()
    assert torch.equal(again, ModelRunner(loaded, 32, BLOCK_SIZE).backend.logits(one(text, 0, 1)))


def test_a_pipeline_computes_a_text_anew_that_its_caller_has_shortened(loaded: LoadedModel) -> None:
    capacity = Capacity(num_blocks=64, block_size=4, max_rows=4, max_model_len=72)
    runner = ModelRunner(loaded, capacity.num_blocks, capacity.block_size, max_rows=capacity.max_rows)
    pipeline = TextPipeline(runner, capacity, max_batch_tokens=8)

    def told(each: Any, steps: int) -> list[int]:
        return list(pipeline.execute(TextGenerationInputs(batches=[[each]], num_steps=steps))[each.request_id].tokens)

    prompt, params = drawn(13), SamplingParams(temperature=0, max_new_tokens=12)
    whole = context(prompt, params)
    want = told(whole, 12)
    pipeline.release(whole.request_id)
    other = context(prompt, params)
    first = told(other, 4)
    # Its last tokens are to be computed once more.
    other.tokens.rewind_processing(3)
    assert first + told(other, 8) == want
    pipeline.close()


@pytest.mark.parametrize("arch", ["lfm2", "qwen3_5_text", "falcon_h1"])
@pytest.mark.parametrize("failing", [2, 4])
def test_a_pipeline_goes_on_after_a_step_that_failed(
    arch: str, failing: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A processor fails behind the pass: once beside a piece of a prompt, and once where both requests sample."""
    model = load(tiny_hybrid(arch, tmp_path_factory.getbasetemp()))
    capacity = Capacity(num_blocks=64, block_size=4, max_rows=4, max_model_len=72)
    prompts = drawn(3), drawn(19)

    def answers(failing: int) -> tuple[list[list[int]], int]:
        calls = 0

        def fails(_: BatchProcessorInputs) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise ArithmeticError("once")

        runner = ModelRunner(model, capacity.num_blocks, capacity.block_size, max_rows=capacity.max_rows)
        pipeline = TextPipeline(runner, capacity, max_batch_tokens=8, batch_processors=[fails])
        contexts = [context(prompt, SamplingParams(temperature=0, max_new_tokens=8)) for prompt in prompts]
        raised = 0
        for _ in range(8):
            if all(each.is_done for each in contexts):
                break
            try:
                pipeline.execute(TextGenerationInputs(batches=[contexts], num_steps=4))
            except ArithmeticError:
                raised += 1
        pipeline.close()
        return [each.tokens.all.tolist() for each in contexts], raised

    want, _ = answers(0)
    assert [len(tokens) for tokens in want] == [11, 27]
    assert answers(failing) == (want, 1), prompts


def test_a_row_that_a_failed_pass_has_left_can_only_begin_anew(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ModelRunner(loaded, 32, BLOCK_SIZE).backend
    text = drawn(20)
    want = backend.logits(one(text, 0, 0)).clone()
    backend.logits(one(text[:12], 0, 1))
    assert loaded.recurrent is not None
    with monkeypatch.context() as patched:
        patched.setattr(loaded.recurrent.mixers[-1], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backend.logits(one(text, 12, 1))
    for length in (13, 20):
        with pytest.raises(RuntimeError, match=r"row 1 goes on behind 12 tokens, .* was left by a pass that failed"):
            backend.logits(one(text[:length], 12, 1))
    assert torch.equal(backend.logits(one(text, 0, 1)), want)


def test_what_such_a_model_cannot_be_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tiny_hybrid("lfm2", tmp_path)
    with pytest.raises(ModelRefused, match="tensor_parallel 2: recurrent layers are not split: leave it out"):
        load_part(path, "float32", 2, None, lambda *_: None)  # type: ignore[arg-type]
    served = make_model(tmp_path / "served")
    draft = Path(shutil.copytree(path, tmp_path / "draft"))
    for file in served.glob("token*"):
        shutil.copy(file, draft / file.name)
    # Its weights are not read.
    (draft / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="draft: Lfm2ForCausalLM has recurrent states, which cannot"):
        load_guesser(str(draft), str(served), load(served), lambda *_: None)


def test_rows_that_begin_in_one_pass_are_told_apart_from_those_that_go_on(loaded: LoadedModel) -> None:
    states = ModelRunner(loaded, 8, BLOCK_SIZE, max_rows=3).cache.states
    assert states is not None
    assert states.num_bytes == sum(tensor.nbytes for tensor in states.tensors.values())
    for tensor in states.tensors.values():
        tensor.fill_(1)
    states.positions[:] = [4, 4, 4]
    batch = one(drawn(5), 4, 2)
    other = one(drawn(2), 0, 0)
    assert states.begin(batch).tolist() == [2]
    states.end(batch, np.array([2]))
    assert states.begin(other).tolist() == [0]
    states.end(other, np.array([0]))
    assert states.positions.tolist() == [2, 4, 5]
    for tensor in states.tensors.values():
        assert not tensor[0].any()
        assert bool((tensor[1:] == 1).all())
    assert batch.starts is not None
    assert batch.starts.tolist() == [4]
