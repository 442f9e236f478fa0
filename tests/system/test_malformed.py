"""Bodies that are wrong in random ways, to each route: every one is answered in time with the dialect's error, and then
the server is as it was.
"""

from __future__ import annotations

import copy
import json
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.system.fuzz import LONG, PAUSES, Unharmed
from tests.system.server import Server

BODIES = LONG or 25
"""For each route."""

SECONDS = 30.0
REFUSALS = {400, 404, 405, 413, 415, 422, 429}

JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, 0.5, -0.5, 1e308, -1e308, float("nan"), float("inf"),
    "", "x", "\0", "日本😀", "-1", "NaN", [], {}, [[]], [None], [[[[]]]], {"": {}}, [1, "a", None], ["a"] * 1000,
    [10**6], [-1], [2**40], list(range(5000)), [[1.5]], {"type": "x"}, {"role": "user", "content": "x"}, "data:x",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def unharmed(target: Server) -> Iterator[None]:
    with Unharmed(target):
        yield


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


def junk(rng: random.Random) -> Any:
    kind = rng.randrange(60)
    if kind == 0:
        return "a" * (10 << 20 if rng.random() < 0.1 else 1 << 18)
    if kind < 4:
        return nested(rng.choice([5, 50, 300]))
    return copy.deepcopy(rng.choice(JUNK))


def changed(rng: random.Random, value: Any) -> Any:
    """The value with one place of it, or the whole, replaced, removed or repeated."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return junk(rng)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.15:
        del value[key]
    else:
        value[key] = changed(rng, value[key])
    return value


def body(rng: random.Random, examples: list[Any], names: list[str]) -> bytes:
    value = copy.deepcopy(rng.choice(examples)) if examples else {}
    for _ in range(rng.randint(0, 2)):
        value = changed(rng, value)
    if isinstance(value, dict):
        for name in rng.sample(names, min(len(names), rng.randint(0, 2))):
            value[name] = junk(rng)
    data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
    match rng.randrange(12):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            at = rng.randrange(len(data) + 1)
            return data[:at] + bytes(rng.randrange(256) for _ in range(3)) + data[at:]
        case 2:
            return rng.choice([b"", b"null", b"[]", b'"', b"\xff\xfe", b"[" * 100_000, b"1" * 10_000])
    return data


def properties(document: dict[str, Any], schema: Any) -> list[str]:
    """Names of all fields that a body may have."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    nested = [name for part in schema.get("anyOf", []) for name in properties(document, part)]
    return [*schema.get("properties", {}), *nested]


def check_error(path: str, response: httpx.Response) -> None:
    answer = response.json()
    # SGLang's routes for adapters say why in a shape of their own.
    error = answer["error_message"] if "error_message" in answer else answer["error"]
    if "error_message" in answer:
        assert answer["success"] is False
    elif isinstance(error, str):
        assert answer["error_type"]
    else:
        error = error["message"]
    assert len(error) > 5
    assert len(response.content) < 20_000, (path, len(response.content))


LONG_TEXT = "a b" * (10 << 18)
MESSAGE = {"role": "user", "content": LONG_TEXT}
SHORT = {"role": "user", "content": "x"}
LONG_TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"inputs": LONG_TEXT}),
    ("/tokenize", {"prompt": LONG_TEXT}),
    ("/v1/tokenize", {"prompt": [LONG_TEXT[: 1 << 18]] * 8}),
    ("/v1/tokenize", {"messages": [MESSAGE]}),
    ("/chat_tokenize", {"messages": [MESSAGE]}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [MESSAGE]}),
    ("/generate", {"inputs": LONG_TEXT, "parameters": {"truncate": 10}}),
    ("/generate", {"text": "x", "sampling_params": {"stop": LONG_TEXT}}),
    ("/generate", {"inputs": "x", "parameters": {"stop": [LONG_TEXT]}}),
    ("/v1/completions", {"prompt": "x", "stop": LONG_TEXT}),
    ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [SHORT], "stop_sequences": [LONG_TEXT]}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(LONG_TEXTS)))
def test_a_text_beyond_all_bounds_is_refused(target: Server, case: int) -> None:
    path, sent = LONG_TEXTS[case]
    if "model" in sent:
        assert target.model is not None
        sent = sent | {"model": target.model.name}
    response = httpx.post(target.url + path, json=sent, timeout=SECONDS)
    assert response.status_code in (400, 422), response.text[:500]
    check_error(path, response)
    assert "at most" in response.text or "must be <=" in response.text


def test_every_malformed_body_gets_an_answer(target: Server) -> None:
    with urllib.request.urlopen(target.url + "/openapi.json", timeout=10) as response:
        document = json.load(response)
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    answered = {200: 0, 400: 0}
    with httpx.Client(base_url=target.url, timeout=SECONDS) as client:
        for path, methods in document["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
            if content is None:
                continue
            examples = [example["value"] for example in content.get("examples", {}).values()]
            names = sorted(set(properties(document, content["schema"])))
            for _ in range(BODIES):
                sent = body(rng, examples, names)
                where = f"seed {seed}, {path}, {sent[:300]!r}"
                response = client.post(path, content=sent, headers={"content-type": "application/json"})
                if path in PAUSES:
                    client.post("/continue_generation", json={})
                answered[response.status_code] = answered.get(response.status_code, 0) + 1
                assert response.status_code in REFUSALS | {200}, (where, response.text[:500])
                if response.status_code != 200:
                    check_error(path, response)
    assert answered[200] > 0
    assert answered[400] > BODIES, answered
