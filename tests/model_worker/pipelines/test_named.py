"""Processors and adapters that a pipeline's contexts name: each request gets what it gets alone, beside the base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from interfaces import SamplingParams, TextContext
from model_worker.sampling.registry import load_processors
from tests.model_worker.adapters.made import Recipe, make
from tests.model_worker.pipelines.test_text import pipeline_of, run
from tests.model_worker.tiny_models import tiny_model
from tests.system.in_process import load

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_new_tokens=5)
PROCESSOR = "tests.model_worker.sampling.test_processors:ForRequest"


def truth(model: Any) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return [int(token) for token in out[0, len(PROMPT) :]]


def test_a_batch_of_an_adapter_a_processor_and_neither(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, seed=2)
    made = make(path, tmp_path / "adapter", Recipe(rank=3), seed=1)
    base = make(path, tmp_path / "none", Recipe(targets=()), seed=1)
    pipeline = pipeline_of(load(path), processors=load_processors({"count": PROCESSOR}))
    pipeline.load_adapter("a", made.folder)
    contexts = [TextContext.from_prompt(PROMPT, GREEDY, adapter=name) for name in ("a", "")]
    named = replace(GREEDY, named_processors={"count": '{"base": 20}'})
    contexts.append(TextContext.from_prompt([5, 6, 7], named))
    tokens = run(pipeline, contexts, 2)
    assert tokens[0] == truth(made.merged)
    assert tokens[1] == truth(base.merged)
    assert tokens[0] != tokens[1]
    assert tokens[2] == [23, 24, 25, 26, 27]
    with pytest.raises(ValueError, match="there is no adapter 'b'; there are: 'a'"):
        run(pipeline, [TextContext.from_prompt(PROMPT, GREEDY, adapter="b")], 1)
    wrong = replace(GREEDY, named_processors={"count": "{}"})
    with pytest.raises(ValueError, match=r"the logits processor 'count'\.base is missing"):
        run(pipeline, [TextContext.from_prompt(PROMPT, wrong)], 1)
    with pytest.raises(ValueError, match="there is an adapter 'a' already"):
        pipeline.load_adapter("a", made.folder)
    with pytest.raises(ValueError, match=r"cannot be used: .*no adapter"):
        pipeline.load_adapter("c", tmp_path / "nothing")
    pipeline.unload_adapter("a")
    with pytest.raises(ValueError, match="there are: none"):
        pipeline.unload_adapter("a")
