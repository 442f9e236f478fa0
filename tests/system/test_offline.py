"""docs/offline.md, run as it stands; and the offline tokenizer with the offline pipeline."""

from __future__ import annotations

import copy
import json
import random
import re
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from api_server.generation.offline_tokenizer import TextTokenizer
from interfaces import (
    GenerationStatus,
    PipelineTokenizer,
    RequestID,
    SamplingParams,
    SamplingParamsInput,
    TextGenerationInputs,
    TextGenerationRequest,
    TextGenerationResponseFormat,
)
from interfaces.request.constraint import Constraint, ConstraintKind
from model_worker.grammar import mask_process
from model_worker.grammar.masks import Masks
from model_worker.pipelines.text import TextPipeline
from tests.model_worker.tiny_models import own_tiny_model
from tests.system.in_process import InProcessServer, Shape, load

DOCUMENT = Path(__file__).parents[2] / "docs" / "offline.md"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_LENGTH = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes; 256 ends a text."""
    backend = Backend(
        models.BPE({symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=CHAT)
    path = own_tiny_model("llama", tmp_path_factory.mktemp("models"), vocab_size=257, eos_token_id=256)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> TextTokenizer:
    return TextTokenizer.load(str(model), MAX_LENGTH)


def test_the_documents_example_runs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    script, changed = re.subn(r'^MODEL = ".*"', f"MODEL = {str(model)!r}", example, flags=re.MULTILINE)
    assert changed == 1
    path = tmp_path / "offline.py"
    path.write_text(script)
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["capital", "story", "sky"]
    assert lines[2] in ("sky: 'yes'", "sky: 'no'")


async def test_a_request_becomes_a_context(tokenizer: TextTokenizer) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert isinstance(tokenizer, PipelineTokenizer)
    assert (tokenizer.eos, tokenizer.eos_token_ids, tokenizer.expects_content_wrapping) == (256, {256}, False)
    request = TextGenerationRequest(
        RequestID("r"),
        "tiny",
        messages=messages,
        sampling=SamplingParamsInput(temperature=0, max_new_tokens=9, stop=["END"], stop_token_ids=[7]),
        cache_salt="pepper",
        logprobs=1,
    )
    context = await tokenizer.new_context(request)
    prompt = "<user>hi<assistant>"
    assert await tokenizer.decode(context.tokens.prompt) == prompt
    assert context.tokens.prompt.tolist() == (await tokenizer.encode(prompt, True)).tolist()
    assert (context.request_id, context.model_name, context.cache_salt) == ("r", "tiny", "pepper")
    assert context.max_length == len(prompt) + 9
    assert context.eos_tracker.eos_token_ids == {7, 256}
    assert list(context.eos_tracker.eos_stop_strings) == ["END"]
    assert context.log_probabilities == 1


async def test_final_values_are_final(tokenizer: TextTokenizer) -> None:
    params = SamplingParams(seed=0, top_k=5, temperature=0.5, ignore_eos=True, stop_token_ids=[3])
    form = TextGenerationResponseFormat("json_schema", {"type": "object"})
    request = TextGenerationRequest(
        RequestID("r"), prompt=[1, 2], sampling_params=params, response_format=form, logprobs=2
    )
    context = await tokenizer.new_context(request)
    values = context.sampling_params
    assert (values.seed, values.top_k, values.temperature, values.stop_token_ids) == (0, 5, 0.5, [3])
    assert context.max_length == MAX_LENGTH
    assert context.json_schema is None
    assert "object" in str(context.grammar)
    assert context.log_probabilities == 2


async def test_no_new_tokens_are_an_answer(tokenizer: TextTokenizer) -> None:
    request = TextGenerationRequest(RequestID("r"), prompt="hi", sampling=SamplingParamsInput(max_new_tokens=0))
    assert (await tokenizer.new_context(request)).status is GenerationStatus.MAXIMUM_LENGTH


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (TextGenerationRequest(RequestID("r")), "exactly one of prompt and messages"),
        (TextGenerationRequest(RequestID("r"), prompt=""), "the prompt is empty"),
        (TextGenerationRequest(RequestID("r"), prompt=[257]), "token id 257"),
        (TextGenerationRequest(RequestID("r"), prompt="x", n=2), "n must be 1, got 2"),
        (TextGenerationRequest(RequestID("r"), prompt="x" * (MAX_LENGTH + 1)), "context holds 512 tokens"),
        (
            TextGenerationRequest(RequestID("r"), prompt="x", sampling=SamplingParamsInput(temperature=3)),
            "temperature must be between 0 and 2, got 3",
        ),
    ],
)
async def test_a_bad_request_is_a_value_error(
    tokenizer: TextTokenizer, request_: TextGenerationRequest, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        await tokenizer.new_context(request_)


async def test_texts_that_are_too_long_and_ids_that_are_none(tokenizer: TextTokenizer) -> None:
    assert (await tokenizer.encode("é", True)).dtype == np.int64
    with pytest.raises(ValueError, match="the prompt has 600 tokens; at most 512 fit"):
        await tokenizer.encode("x" * 600, True)
    with pytest.raises(ValueError, match="token id 999"):
        await tokenizer.decode([999])
    assert await tokenizer.decode([0, 256]) != await tokenizer.decode([0, 256], skip_special_tokens=False)


async def test_the_offline_pair_has_the_tokens_of_the_server(model: Path, tokenizer: TextTokenizer) -> None:
    texts = ["Once upon a time", "To be, or not to be", "x", "What is it? " * 3]
    values = [
        SamplingParamsInput(temperature=0.0, max_new_tokens=12),
        SamplingParamsInput(temperature=1.0, seed=5, max_new_tokens=12),
    ]
    requests = [
        TextGenerationRequest(RequestID(f"{i}.{k}"), prompt=text, sampling=sampling)
        for i, text in enumerate(texts)
        for k, sampling in enumerate(values)
    ]
    contexts = [await tokenizer.new_context(request) for request in requests]
    server = InProcessServer(load(model), Shape())
    for context in contexts:
        server.submit(context.tokens.prompt.tolist(), context.sampling_params)
    answers = [answer.tokens for answer in server.run()]
    pipeline = TextPipeline.load(model, dtype="float32", max_length=MAX_LENGTH)
    outputs = pipeline.execute(TextGenerationInputs([contexts], num_steps=12))
    assert [outputs[request.request_id].tokens for request in requests] == answers


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}, "ok": {"const": True}},
    "required": ["name", "kind", "ok"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Constraint(ConstraintKind.REGEX, "[0-9]{2,4}(, [a-f]{3}){1,3}[.]"),
    Constraint(ConstraintKind.CHOICE, '["one of them", "another", "and a third"]'),
    Constraint(ConstraintKind.EBNF, 'root ::= "<" [a-z]+ ">" ("(" root ")")?'),
    Constraint(ConstraintKind.REGEX, "[0-9]{3}", begins_after="e"),
    None,
]


def formed(text: str, constraint: Constraint) -> bool:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), SCHEMA)
            return True
        case ConstraintKind.CHOICE:
            return text in json.loads(constraint.source)
        case ConstraintKind.EBNF:
            return re.fullmatch(r"(<[a-z]+>\(?)+\)*", text) is not None
        case _:
            begun = text.partition(constraint.begins_after)[2] if constraint.begins_after else text
            return re.fullmatch(constraint.source, begun) is not None


async def test_a_form_is_kept_to_offline_as_by_the_server(model: Path, tokenizer: TextTokenizer) -> None:
    """Whatever the contexts go through in between: batches of any company, roll-backs and resets."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    asked = [(rng.randrange(2**32), constraint) for constraint in CONSTRAINTS for _ in range(2)]
    requests = [
        TextGenerationRequest(
            RequestID(f"{i}"),
            prompt="x" * rng.randint(1, 9),
            constraint=constraint,
            sampling=SamplingParamsInput(temperature=1.0, seed=number, max_new_tokens=60),
        )
        for i, (number, constraint) in enumerate(asked)
    ]
    contexts = [await tokenizer.new_context(request) for request in requests]
    masks = Masks(mask_process.fork_server(str(model), 16), 16, 257)
    server = InProcessServer(load(model), Shape(max_model_len=80), [masks])
    for context in contexts:
        server.submit_context(copy.deepcopy(context))
    answers = [answer.tokens for answer in server.run()]
    masks.close()
    pipeline = TextPipeline.load(model, dtype="float32", max_length=MAX_LENGTH, kv_memory=1 << 22)
    while running := [context for context in contexts if not context.is_done]:
        some = rng.sample(running, rng.randint(1, len(running)))
        for context in rng.sample(some, rng.randint(0, len(some))):
            if rng.random() < 0.3:
                context.reset()
            elif context.tokens.generated_length:
                context.drop_last_tokens(rng.randint(1, min(3, context.tokens.generated_length)))
        pipeline.execute(TextGenerationInputs([some], num_steps=rng.randint(1, 9)))
    pipeline.close()
    for context, answer, (_, constraint) in zip(contexts, answers, asked, strict=True):
        generated = context.tokens.all[context.prompt_length :].tolist()
        assert generated == answer, f"seed {seed}"
        if constraint is not None and context.status is GenerationStatus.END_OF_SEQUENCE:
            assert formed(await tokenizer.decode(generated), constraint), f"seed {seed}"
    assert any(context.status is GenerationStatus.END_OF_SEQUENCE for context in contexts)


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint(ConstraintKind.REGEX, "("), "regex cannot be enforced"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": 7}', field="schema"), "schema cannot be enforced"),
        (Constraint(ConstraintKind.REGEX, "a" * (1 << 20)), "characters; at most"),
    ],
)
async def test_a_form_that_cannot_be_kept_to_is_a_value_error(
    tokenizer: TextTokenizer, constraint: Constraint, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        await tokenizer.new_context(TextGenerationRequest(RequestID("r"), prompt="x", constraint=constraint))
