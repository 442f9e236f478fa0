"""Constrained rows among free ones, through chunks, preemptions and two steps in flight: valid, and as when alone."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from api_server.constraints.languages import JSON_OPTIONS
from deploy import embedded_model
from interfaces import Finish, SamplingParams
from interfaces.context.grammar_state import GrammarState
from interfaces.request.sampling import LogprobMode
from model_worker.grammar import mask_process
from model_worker.grammar.masks import Masks
from model_worker.model import LoadedModel
from shared.grammar import GrammarError
from tests.api_server.constraints.vocabulary import EOS, compiled
from tests.model_worker.tiny_models import own_tiny_model
from tests.system.in_process import Answer, InProcessServer, Shape, load

WEIGHTS = Path(embedded_model.__file__).parent / "weights"
VOCAB = 4096
LONG_FORM = int(os.environ.get("TOKENYARD_TEST_SCHEMAS", "24"))
"""Random schemas to try; 500 in the long form."""
ROOM = Shape(num_blocks=4000, max_model_len=900, max_rows=32, max_batch_tokens=256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over the embedded model's tokens."""
    path = own_tiny_model("llama", tmp_path_factory.mktemp("model"), vocab_size=VOCAB, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / name, path / name)
    return path


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    return load(model)


@pytest.fixture(scope="module")
def masks(model: Path) -> Iterator[Masks]:
    made = Masks(mask_process.fork_server(str(model), 32), 32, VOCAB)
    made.start()
    yield made
    made.close()


def text(answer: Answer) -> str:
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    return str(tokenizer.decode([token for token in answer.tokens if token != EOS], skip_special_tokens=False))


def params(rng: random.Random, most: int, **values: Any) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        seed=rng.randrange(2**64),
        max_new_tokens=most,
        stop_token_ids=[EOS],
        **values,
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "minItems": 1, "maxItems": 4},
        "b": {"enum": ["x", "longer value", None]},
        "c": {"type": "string", "maxLength": 12},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("overlap", [True, False])
def test_the_crowd_does_not_matter(loaded: LoadedModel, masks: Masks, overlap: bool) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    grammars = [compiled("json_schema", SCHEMA), compiled("regex", r"([0-9]{3}-){2,9}x"), None]
    asked = []
    for i in range(12):
        grammar = grammars[i % 3]
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]
        asked.append((prompt, params(rng, 50), {} if grammar is None else {"grammar": grammar}))
    small = Shape(num_blocks=60, max_model_len=100, overlap=overlap)
    alone = []
    for prompt, values, fields in asked:
        server = InProcessServer(loaded, small, [masks])
        server.submit(prompt, values, **fields)
        alone.append(server.run()[0])
    crowd = InProcessServer(loaded, dataclasses.replace(small, device_overlap="cuda" if overlap else "off"), [masks])
    for prompt, values, fields in asked:
        crowd.submit(prompt, values, **fields)
    together = crowd.run()
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone], f"seed {seed}"
    assert crowd.scheduler.counters["preemptions"] > 0
    for answer, (_, _, fields) in zip(together, asked, strict=True):
        if fields and answer.finished == Finish.STOP and text(answer).startswith("{"):
            jsonschema.validate(json.loads(text(answer)), SCHEMA)


FORCED = {
    "type": "object",
    "properties": {
        "kind": {"const": "a value that is long enough to be many tokens"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["kilometres per hour", "kilograms per cubic metre"]},
        "end": {"const": {"nothing": None, "everything": [True, True, False]}},
    },
    "required": ["kind", "count", "unit", "end"],
    "additionalProperties": False,
}


SENTENCE = r"It is [0-9]{1,3} degrees in (Paris|Rome) today, and nothing else was measured; (good|bad) weather\."


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_forced_tokens_come_in_fewer_steps(loaded: LoadedModel, masks: Masks, kind: str, overlap: bool) -> None:
    """A row whose tokens are told one by one (log-probabilities) has the same ones."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    grammar = compiled(kind, FORCED if kind == "json_schema" else SENTENCE)
    asked = [([rng.randrange(3, VOCAB) for _ in range(5)], params(rng, rng.choice([150, 150, 30]))) for _ in range(6)]

    def served(shape: Shape, **told: Any) -> tuple[list[Answer], InProcessServer]:
        server = InProcessServer(loaded, shape, [masks])
        for prompt, values in asked:
            server.submit(prompt, dataclasses.replace(values, **told), grammar=grammar)
        return server.run(), server

    room = dataclasses.replace(ROOM, overlap=overlap)
    jumping, fast = served(room)
    told, slow = served(room, logprobs=LogprobMode.TEMPERED)
    blocks = 18 if kind == "regex" else 24
    small = dataclasses.replace(
        room, num_blocks=blocks, block_size=8, max_batch_tokens=24, device_overlap="cuda" if overlap else "off"
    )
    crowded, crowd = served(small)
    for answer, one_by_one, again in zip(jumping, told, crowded, strict=True):
        assert answer.tokens == one_by_one.tokens == again.tokens, f"seed {seed}"
        assert answer.finished == one_by_one.finished == again.finished
        if answer.finished == Finish.STOP and kind == "json_schema":
            jsonschema.validate(json.loads(text(answer)), FORCED)
        elif answer.finished == Finish.STOP:
            assert re.fullmatch(SENTENCE, text(answer))
    assert crowd.scheduler.counters["preemptions"] > 0
    assert all(server.scheduler.workers[0].pool.used == 0 for server in (fast, slow, crowd))
    # White space is a choice between any two tokens of JSON; the sentence has few.
    fast_steps, slow_steps = (server.scheduler.workers[0].in_flight.last_number for server in (fast, slow))
    assert fast_steps < (1.0 if kind == "json_schema" else 0.6) * slow_steps


def test_it_begins_after_the_reasoning(loaded: LoadedModel, masks: Masks) -> None:
    """Until `</think>`, here any of many tokens, everything but the end is free; from there on nothing is."""
    ends = list(range(1000, 1400))
    for end in random.sample(ends, 3):
        state = GrammarState()
        state.set_thinking_region(None, [end])
        server = InProcessServer(loaded, ROOM, [masks])
        bias = {end: 6.0}
        values = SamplingParams(temperature=1.0, max_new_tokens=400, stop_token_ids=[EOS], logit_bias=bias)
        server.submit([5, 6, 7], values, grammar=compiled("choice", ["yes", "no"]), grammar_state=state)
        (answer,) = server.run()
        assert EOS not in answer.tokens[:-1]
        if end in answer.tokens:
            cut = answer.tokens.index(end) + 1
            assert text(Answer(answer.tokens[cut:])) in ("yes", "no")
            assert answer.finished == Finish.STOP


def test_a_grammar_that_fails_fails_alone(loaded: LoadedModel, masks: Masks) -> None:
    server = InProcessServer(loaded, ROOM, [masks])
    values = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=[EOS])
    good = compiled("regex", "[0-9]{8}")
    asked: list[dict[str, Any]] = [{"grammar": good}, {"grammar": "start: nowhere"}, {}, {"grammar": good}]
    # Ends the process that fills masks: nothing but its clock stops this one.
    asked.append({"grammar": 'start: %json {"type": "integer", "multipleOf": 16777217}'})
    for fields in asked:
        server.submit([5, 6, 7], values, **fields)
    answers = server.run()
    assert [answer.finished for answer in answers] == [
        Finish.STOP,
        Finish.FAILED,
        Finish.LENGTH,
        Finish.STOP,
        Finish.FAILED,
    ]
    assert "nowhere" in answers[1].error
    assert "its grammar takes too much memory, or more than 2 s" in answers[4].error
    assert text(answers[0]).isdigit()
    assert answers[0].tokens == answers[3].tokens


SCALARS = st.one_of(st.text(max_size=5), st.integers(-999, 999), st.booleans(), st.none())
LEAVES = st.one_of(
    st.fixed_dictionaries({"enum": st.lists(SCALARS, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"const": SCALARS}),
    st.fixed_dictionaries({"type": st.sampled_from(["boolean", "null", "number", "integer", ["integer", "null"]])}),
    st.fixed_dictionaries(
        {"type": st.just("integer"), "minimum": st.integers(-99, 0)},
        optional={"maximum": st.integers(1, 999), "multipleOf": st.integers(1, 30)},
    ),
    st.fixed_dictionaries(
        {"type": st.just("number"), "exclusiveMinimum": st.floats(-9, 0)}, optional={"maximum": st.floats(0.5, 9)}
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "maxLength": st.integers(2, 9)}, optional={"minLength": st.integers(0, 2)}
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "format": st.sampled_from(["date", "ipv4", "uuid", "date-time"])}
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "pattern": st.sampled_from(["^a+$", "^[0-9]{2}-[x-z]$", "^(ab|c)*$", "q"])}
    ),
)
NAMES = st.text('abcd $é"', min_size=1, max_size=3)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def required(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        names = list(schema["properties"])
        chosen = st.lists(st.sampled_from(names), unique=True) if names else st.just([])
        return chosen.map(lambda some: schema | {"required": some})

    members = {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=4)}
    return st.fixed_dictionaries(members | {"additionalProperties": st.just(False)}).flatmap(required)


NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "maxItems": st.integers(2, 4)},
            optional={"minItems": st.integers(0, 2), "prefixItems": st.lists(inner, min_size=1, max_size=2)},
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
    ),
    max_leaves=8,
)
SHARED = st.fixed_dictionaries({"x": NESTED, "y": NESTED}).map(
    lambda some: {"$defs": some, "type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 3}
)
SCHEMAS = st.one_of(NESTED, SHARED)
"""Every keyword of these is enforced."""


def compiled_or_impossible(schema: dict[str, Any]) -> str | None:
    """None for a schema without an instance that could be written; every other refusal is an error."""
    try:
        return compiled("json_schema", schema)
    except GrammarError as refused:
        if "nsatisfiable" in str(refused) or "control character" in str(refused):
            return None
        raise


FORMATS = jsonschema.FormatChecker(["date", "ipv4", "uuid"])


@settings(max_examples=max(1, LONG_FORM // 8), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(SCHEMAS, min_size=8, max_size=8), st.integers(0, 2**31))
def test_random_schemas(loaded: LoadedModel, masks: Masks, schemas: list[dict[str, Any]], seed: int) -> None:
    """Every answer is valid, or honestly cut off."""
    server, rng, asked = InProcessServer(loaded, ROOM, [masks]), random.Random(seed), []
    for schema in schemas:
        grammar = compiled_or_impossible(schema)
        if grammar is not None:
            server.submit([rng.randrange(3, VOCAB) for _ in range(5)], params(rng, 400), grammar=grammar)
            asked.append(schema)
    for schema, answer in zip(asked, server.run(), strict=True):
        assert answer.finished in (Finish.STOP, Finish.LENGTH), (schema, answer)
        if answer.finished == Finish.STOP:
            document = json.loads(text(answer))
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(document)


def test_white_space_ends(loaded: LoadedModel, masks: Masks) -> None:
    """A model that likes nothing better than white space gets done all the same."""
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    blank = {
        token: 50.0 for name, token in tokenizer.get_vocab().items() if name and not tokenizer.decode([token]).strip()
    }
    server = InProcessServer(loaded, ROOM, [masks])
    values = SamplingParams(temperature=0, max_new_tokens=800, stop_token_ids=[EOS], logit_bias=blank)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    server.submit([5, 6], values, grammar=compiled("json_schema", schema))
    (answer,) = server.run()
    assert answer.finished == Finish.STOP
    assert json.loads(text(answer)) == {"a": 1}
    assert "{0,32}" in JSON_OPTIONS["whitespace_pattern"]  # type: ignore[operator]
