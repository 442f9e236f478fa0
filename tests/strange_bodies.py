"""JSON bodies that are wrong in random ways, and what the answers to them must look like."""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import httpx

REFUSALS = {400, 404, 405, 413, 415, 422, 429}

JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, 0.5, -0.5, 1e308, -1e308, float("nan"), float("inf"),
    "", "x", "\0", "日本😀", "-1", "NaN", [], {}, [[]], [None], [[[[]]]], {"": {}}, [1, "a", None], ["a"] * 1000,
    [10**6], [-1], [2**40], list(range(5000)), [[1.5]], {"type": "x"}, {"role": "user", "content": "x"}, "data:x",
]  # fmt: skip

# What a program says of its own parts.
_INSIDE = re.compile(r"Traceback|pydantic|instance of|<class '|object at 0x|NoneType|internal_error")
# The fields of an error in each dialect: OpenAI's, SGLang's, Anthropic's.
_ERRORS = ({"message", "type", "param", "code"}, {"message", "type", "code"}, {"message", "type"})


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


def send_to_every_route(
    client: httpx.Client,
    document: dict[str, Any],
    count: int,
    left_out: Collection[str] = (),
    after: Callable[[str], None] = lambda path: None,
) -> Counter[int]:
    """Send so many random bodies to each route of an OpenAPI document, and judge each answer.

    `after` is called with the path once an answer is there. Returns how often each status came.
    """
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    statuses: Counter[int] = Counter()
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None or path in left_out:
            continue
        examples = [example["value"] for example in content.get("examples", {}).values()]
        names = sorted(set(properties(document, content["schema"])))
        for _ in range(count):
            sent = body(rng, examples, names)
            where = f"seed {seed}, {path}, {sent[:300]!r}"
            response = client.post(path, content=sent, headers={"content-type": "application/json"})
            after(path)
            statuses[response.status_code] += 1
            # Ollama's requests that change its store of models are refused with a status of their own.
            further = {501} if path == "/api/pull" else set()
            assert response.status_code in REFUSALS | {200} | further, (where, response.text[:500])
            if response.status_code == 200:
                check_whole(response, where)
            else:
                check_error(path, response)
    return statuses


def properties(document: dict[str, Any], schema: Any) -> list[str]:
    """Names of all fields that a body may have."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    nested = [name for part in schema.get("anyOf", []) for name in properties(document, part)]
    return [*schema.get("properties", {}), *nested]


def check_error(path: str, response: httpx.Response) -> None:
    """The body is an error of a dialect: of the path's own, where a path belongs to one."""
    answer = response.json()
    if "error_message" in answer:
        # SGLang's answer to an order about adapters that was understood and cannot be carried out.
        assert path in ("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"), (path, answer)
        assert answer["success"] is False
        assert len(answer["error_message"]) > 5
        return
    error = answer["error"]
    if path.startswith(("/api/", "/v2/models/")):
        assert set(answer) == {"error"}, (path, answer)
    elif isinstance(error, str):
        assert set(answer) == {"error", "error_type"}, (path, answer)
        assert answer["error_type"]
        assert not path.startswith("/v1/") or path.endswith("/rerank"), (path, answer)
    else:
        is_anthropics = path.startswith("/v1/messages")
        further = {"type", "request_id"} if is_anthropics else set()
        # Cohere's clients read a message beside the error, and two of its paths are also others'.
        if path.endswith("/rerank") and ("message" in answer or path == "/v2/rerank"):
            further = {"message"}
        if "success" in answer:
            # SGLang's answers to orders about weights have their own fields beside the error.
            assert answer["success"] is False
            further = set(answer) - {"error"}
        assert set(answer) == {"error", *further}, (path, answer)
        assert set(error) in (_ERRORS[2:] if is_anthropics else _ERRORS[:2]), (path, answer)
        error = error["message"]
    assert len(error) > 5
    assert len(response.content) < 20_000, (path, len(response.content))
    found = _INSIDE.search(error)
    assert not found, (path, error)


def check_whole(response: httpx.Response, where: object) -> None:
    """An answer that began well does not end with an error of ours."""
    assert "internal_error" not in response.text, (where, response.text[-500:])
    assert "the details of request" not in response.text, (where, response.text[-500:])
