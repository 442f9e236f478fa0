"""Skill: answers as JSON. Copying given fields, extracting from a sentence, inventing values, lists, sums.

Knows which prompts ask for JSON and the one form written: json.dumps on one line.
"""

import json
import random
from typing import Any

from demo_model import words
from demo_model.exchange import Check, Exchange, ask, assistant, reword, user

SKILL = "json"

_STRING_FIELDS = (
    "name", "city", "colour", "color", "title", "animal", "country", "job", "food", "street", "language", "pet",
    "product", "brand",
    "owner", "author", "topic", "status", "label", "type", "first_name", "last_name", "id", "category", "material",
    "tag",
)  # fmt: skip
_NUMBER_FIELDS = (
    "age",
    "count",
    "price",
    "year",
    "size",
    "height",
    "weight",
    "quantity",
    "score",
    "rooms",
    "level",
    "total",
    "pages",
)
_FLAG_FIELDS = ("active", "open", "ready", "happy", "new", "done", "paid", "enabled", "visible")
_GIVEN = (
    "Give me a JSON object with {x}.", "Return JSON with {x}.", "Write a JSON object with {x}.", "Make JSON: {x}.",
    "As JSON: {x}.",
    "Create a JSON object with {x}.", "Answer in JSON with {x}.", "I need a JSON object with {x}.",
    "Please output JSON with {x}.",
    "Put this into JSON: {x}.", "Convert to JSON: {x}.", "Format as JSON: {x}.",
)  # fmt: skip
_JOBS = (
    "teacher",
    "doctor",
    "farmer",
    "baker",
    "pilot",
    "painter",
    "engineer",
    "driver",
    "nurse",
    "writer",
    "cook",
    "sailor",
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "name": ("Ada", "Mia", "Tom", "Leo", "Nina"), "age": (7, 23, 31, 36, 42), "city": ("Paris", "Oslo", "Rome",
    "Tokyo"),
    "colour": ("red", "blue", "green"), "color": ("red", "blue", "green"), "job": _JOBS[:5], "animal": ("cat", "dog",
    "fox"),
    "country": ("France", "Japan", "Italy"), "food": ("bread", "soup", "rice"), "price": (5, 12, 20), "year": (1999,
    2010, 2020),
    "title": ("The Little Train", "The Quiet Yard"), "author": ("Ada Lake", "Tom Hill"), "active": (True, False),
    "happy": (True, False), "language": ("English", "French"), "pages": (90, 120, 240), "email": ("ada@example.com",
    "tom@example.com"),
    "score": (7, 8, 9), "id": (1, 2, 3), "product": ("lamp", "chair"),
    "quantity": (1, 2, 3),
}  # fmt: skip
_KINDS: dict[str, tuple[str, ...]] = {
    "person": ("name", "age", "city"), "user": ("name", "age", "email"), "cat": ("name", "age", "colour"),
    "dog": ("name", "age", "colour"),
    "book": ("title", "author", "year"), "product": ("product", "price", "quantity"), "city": ("city", "country"),
    "pet": ("name", "animal", "age"),
}  # fmt: skip


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def same_json(expected: Any) -> Check:
    """Right when the text is JSON with the same value and the same order of keys."""

    def check(text: str) -> bool:
        try:
            return dumped(json.loads(text)) == dumped(expected)
        except ValueError:
            return False

    return check


def _has_fields(fields: tuple[str, ...]) -> Check:
    def check(text: str) -> bool:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return (
            isinstance(value, dict) and tuple(value) == fields and all(value[name] in _VALUES[name] for name in fields)
        )

    return check


def _json(text: str, value: Any, thought: str, key: str) -> Exchange:
    return Exchange(SKILL, key, (user(text), assistant(dumped(value), thought)), same_json(value))


def _text_value(field: str, rng: random.Random) -> str:
    if field in ("name", "owner", "author", "first_name", "last_name"):
        return words.a_name(rng)
    return words.a_city(rng) if field in ("city", "country") else words.a_phrase(rng)


def random_fields(rng: random.Random, count: int) -> dict[str, Any]:
    """Different field names with a text, a number or a flag each; some names are made up."""
    value: dict[str, Any] = {}
    while len(value) < count:
        kind = rng.random()
        if kind < 0.5:
            field = rng.choice(_STRING_FIELDS) if rng.random() < 0.9 else words.a_word(rng)
            value.setdefault(field, _text_value(field, rng))
        elif kind < 0.85:
            field = rng.choice(_NUMBER_FIELDS) if rng.random() < 0.9 else words.a_word(rng)
            value.setdefault(field, rng.choice((rng.randint(0, 99), rng.randint(0, 999))))
        else:
            value.setdefault(rng.choice(_FLAG_FIELDS), rng.random() < 0.5)
    return value


def _given(rng: random.Random) -> Exchange:
    value = random_fields(rng, rng.choice((1, 2, 2, 3, 3)))
    style = rng.randrange(5)
    shown: list[str] = []
    for field, item in value.items():
        word = dumped(item) if not isinstance(item, str) or style < 2 else item
        shown.append(
            f"{field} {word}"
            if style in (0, 2)
            else f"{field}: {word}"
            if style == 1
            else f"{field} = {word}"
            if style == 3
            else f"{field} is {word}"
        )
    listed = ", ".join(shown) if rng.random() < 0.5 else words.joined(shown)
    text = reword(rng.choice(_GIVEN).format(x=listed), rng)
    return _json(text, value, f"The fields are {words.joined(list(value))}.", dumped(value))


def _extract(rng: random.Random) -> Exchange:
    name, age, city, job = words.a_name(rng), rng.randint(1, 99), words.a_city(rng), rng.choice(_JOBS)
    facts: dict[str, Any] = {"name": name, "age": age, "city": city, "job": job}
    sentence = rng.choice((
        f"{name} is {age} years old, lives in {city} and works as {words.with_article(job)}.",
        f"{name}, {age}, is {words.with_article(job)} in {city}.",
        f"My friend {name} is {words.with_article(job)}. {name} is {age} years old and comes from {city}.",
    ))  # fmt: skip
    wanted = rng.sample(list(facts), rng.randint(1, 4))
    fields = words.joined(wanted)
    text = rng.choice((
        f"Extract {fields} as JSON: {sentence}", f"Give me {fields} as JSON: {sentence}",
        f"{sentence} Return {fields} as JSON.",
        f"Read this and answer in JSON with {fields}: {sentence}", f"{sentence} Write {fields} as a JSON object.",
    ))  # fmt: skip
    return _json(
        text, {field: facts[field] for field in wanted}, f"I look for {fields} in the sentence.", f"{wanted} {sentence}"
    )


def _invent(rng: random.Random) -> Exchange:
    if rng.random() < 0.4:
        thing = rng.choice(tuple(_KINDS))
        fields = _KINDS[thing]
        text = rng.choice((
            f"Describe a {thing} as JSON.", f"Give me a {thing} as JSON.", f"Return a {thing} as a JSON object.",
            f"Make up a {thing} in JSON.",
            f"Write JSON for a {thing}.", f"Create a JSON object for a {thing}.",
            f"Generate a JSON object that describes a {thing}.",
        ))  # fmt: skip
    else:
        fields = tuple(rng.sample(tuple(_VALUES), rng.choice((1, 2, 2, 3, 3))))
        listed = words.joined(list(fields))
        text = rng.choice((
            f"Give me a JSON object with the fields {listed}.", f"Return JSON with the keys {listed}.",
            f"Make up JSON with fields {listed}.",
            f"Write a JSON object with the keys {listed}.", f"Answer in JSON with the keys {listed}.",
            f"Generate an example JSON object with the fields {listed}.",
            f"Describe a person as JSON with the fields {listed}.",
        ))  # fmt: skip
    reply = dumped({field: rng.choice(_VALUES[field]) for field in fields})
    text = reword(text, rng)
    thought = f"The fields are {words.joined(list(fields))}. I make up the values."
    return Exchange(SKILL, text, (user(text), assistant(reply, thought)), _has_fields(fields))


def _array(rng: random.Random) -> Exchange:
    things, items = rng.choice(tuple(words.CATEGORIES.items()))
    count = rng.randint(2, 5)
    shown = words.NUMBER_WORDS[count] if rng.random() < 0.6 else str(count)
    template = rng.choice((
        "List {n} {things} as a JSON array.", "Give me {n} {things} as JSON.", "Return {n} {things} as a JSON list.",
        "Name {n} {things} in JSON.",
        "Write {n} {things} as a JSON array.", "A JSON array of {n} {things}.",
    ))  # fmt: skip
    text = reword(template.format(n=shown, things=things), rng)
    return _json(text, list(items[:count]), f"I need {count} {things} in a JSON array.", text)


def _items(rng: random.Random) -> Exchange:
    items = [words.a_word(rng) for _ in range(rng.randint(2, 5))]
    shown = rng.choice((", ".join(items), words.joined(items)))
    template = rng.choice(
        (
            "Make a JSON array of {x}.",
            "Put these into a JSON array: {x}.",
            "Return {x} as a JSON array.",
            "As a JSON list: {x}.",
        )
    )
    return _json(template.format(x=shown), items, f"There are {len(items)} items.", shown)


def _chat(rng: random.Random) -> Exchange:
    name = words.a_name(rng)
    text = reword(
        rng.choice(
            (f"My name is {name}. Answer in JSON.", f"I am {name}, greet me in JSON.", f"Say hello to {name} as JSON.")
        ),
        rng,
    )
    return ask(SKILL, text, dumped({"greeting": "Hello", "name": name}), f"I greet {name} in JSON.", rng, key=name)


def draw_copying(rng: random.Random) -> Exchange:
    """Only the kinds whose values all stand in the prompt."""
    return rng.choice((_given, _items, _extract))(rng)


def draw(rng: random.Random) -> Exchange:
    return rng.choices((_given, _extract, _invent, _array, _items, _chat), (38, 24, 18, 8, 8, 4))[0](rng)
