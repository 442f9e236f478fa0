"""The weight of a body: exact where it must be, never below what is there, and about what parsing it takes."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import orjson
import pytest

from api_server.body import weight
from api_server.body.weight import Weight, exactly

CHARACTERS = ['"', "\\", "\\\\", ",", "{", "}", "[", "]", ":", "a", "é", "\n", "\x00", "😀", '\\"', '",', '["']


def some_text(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.randrange(12)))


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 5 else 4)
    if kind == 4:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    if kind == 5:
        return {some_text(rng): some_value(rng, depth + 1) for _ in range(rng.randrange(6))}
    return [some_text(rng), rng.randrange(-5, 10**6), rng.random(), None][kind]


def marks(value: Any) -> tuple[int, int, int]:
    """Commas, quotes and opening brackets that JSON needs for a value."""
    if isinstance(value, str):
        return 0, 2, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    found = [marks(each) for each in inner]
    commas, quotes, brackets = (sum(each[i] for each in found) for i in range(3))
    return commas + max(0, len(inner) - 1), quotes + (2 * len(value) if isinstance(value, dict) else 0), brackets + 1


@pytest.mark.parametrize("stretch", [2, 3, 7, 64, 1 << 20])
def test_marks_within_texts_do_not_count(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight, "_STRETCH", stretch)
    rng = random.Random(stretch)
    for _ in range(300):
        value = some_value(rng)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        found = exactly(body)
        assert (found._commas, found._quotes, found._brackets) == marks(value), body
        assert found.size == len(body)
        rough = Weight()
        for start in range(0, len(body), 5):
            rough.add(body[start : start + 5])
        assert rough.total >= found.total


def test_what_is_no_json_is_weighed_all_the_same() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        body = bytes(rng.choices(b'"\\,[{}a', k=rng.randrange(40)))
        assert len(body) <= exactly(body).total


@pytest.mark.parametrize(
    "item", ["[]", "{}", '{"a":1}', '"abcd"', "123456", "0.123456789", '{"role":"user","content":"x"}', "[[[]]]"]
)
def test_the_weight_is_about_the_memory(item: str) -> None:
    count = 20_000
    body = f"[{','.join([item] * count)}]".encode()
    tracemalloc.start()
    value = orjson.loads(body)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(value) == count
    assert held < exactly(body).total < 12 * held
