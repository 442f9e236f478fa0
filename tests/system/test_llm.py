"""The offline `LLM`: README's lines, and equality with transformers' own generate and forward."""

from __future__ import annotations

import asyncio
import random
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from demo_model.decoder import text_model
from deploy.embedded_model import EMBEDDED_MODEL_PATH
from deploy.offline import LLM
from interfaces import SamplingParamsInput

README = Path(__file__).parents[2] / "README.md"
WORDS = ["the", "a", "of", "tea", "river", "seven", "cold", "engine", "tomorrow", "green", "carries", "stone"]
MODEL = str(EMBEDDED_MODEL_PATH)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(EMBEDDED_MODEL_PATH, dtype="float32", max_batch_size=4, max_length=256) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    return text_model(EMBEDDED_MODEL_PATH), AutoTokenizer.from_pretrained(MODEL)


def prompts(count: int) -> list[str]:
    rng = random.Random(random.getrandbits(64))
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for _ in range(count)]


def generated(reference: tuple[Any, Any], prompt: str, length: int) -> list[int]:
    model, tokenizer = reference
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        found = model.generate(ids, do_sample=False, max_new_tokens=length)
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


def test_more_prompts_than_rows_get_the_tokens_of_generate(llm: LLM, reference: tuple[Any, Any]) -> None:
    texts = prompts(11)
    lengths = [random.randint(1, 30) for _ in texts]
    sampling = [SamplingParamsInput(temperature=0, max_new_tokens=length) for length in lengths]
    for text, length, answer in zip(texts, lengths, llm.generate(texts, sampling), strict=True):
        expected = generated(reference, text, length)
        assert answer.token_ids == expected
        ended = expected[-1] in reference[0].generation_config.eos_token_id
        assert answer.finish_reason == ("stop" if ended else "length")
        assert answer.prompt_tokens == len(reference[1](text).input_ids)


def test_a_chat_is_what_the_template_makes_of_it(llm: LLM, reference: tuple[Any, Any]) -> None:
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    text = reference[1].apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = reference[1](text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        expected = reference[0].generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :]
    greedy = SamplingParamsInput(temperature=0, max_new_tokens=20)
    (alone,) = llm.chat(chat, greedy)
    assert alone.token_ids == expected.tolist()
    assert alone.text == reference[1].decode(expected, skip_special_tokens=True)
    assert [answer.text for answer in llm.chat([chat, chat], greedy)] == [alone.text] * 2


def test_stop_strings_end_a_text_before_them(llm: LLM) -> None:
    (whole,) = llm.generate("Once upon a time", SamplingParamsInput(temperature=0, max_new_tokens=40))
    stop = whole.text[10:14]
    (cut,) = llm.generate("Once upon a time", SamplingParamsInput(temperature=0, max_new_tokens=40, stop=[stop]))
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_a_wrong_request_is_named_and_leaves_nothing(llm: LLM) -> None:
    pipeline, _ = llm._texts
    with pytest.raises(ValueError, match=r"request 1: .*temperature"):
        llm.generate(["a", "b"], [SamplingParamsInput(), SamplingParamsInput(temperature=-1)])
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParamsInput()])
    assert pipeline.free_blocks == pipeline.num_blocks
    assert llm.generate([]) == []


def test_vectors_are_those_of_the_models_last_hidden_states(llm: LLM, reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference
    texts = prompts(5)
    vectors = llm.embed(texts)
    for text, vector in zip(texts, vectors, strict=True):
        with torch.inference_mode():
            hidden = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, torch.nn.functional.normalize(hidden, dim=-1).numpy(), atol=2e-5)


async def test_it_works_where_a_loop_runs(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    (answer,) = llm.generate("Hello", SamplingParamsInput(max_new_tokens=3, seed=1))
    assert len(answer.token_ids) <= 3


def test_the_lines_of_the_readme_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 10
    script, changed = re.subn(r'LLM\("[^"]*"\)', f"LLM({MODEL!r})", example)
    assert changed == 1
    path = tmp_path / "readme.py"
    path.write_text(script)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
