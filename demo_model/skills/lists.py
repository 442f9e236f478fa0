"""Skill: lists and words. Enumerating, counting, what comes next, repeating, reversing, first and last.

Knows ordered things. Does not know JSON (see `json_answers`).
"""

import random

from demo_model import words
from demo_model.exchange import Exchange, ask, reword

SKILL = "lists"
WORD_SKILL = "words"

_COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}
_LIST = (
    "List {n} {things}.", "Name {n} {things}.", "Give me {n} {things}.", "Tell me {n} {things}.",
    "Write a list of {n} {things}.",
    "Can you list {n} {things}?", "I need {n} {things}.", "What are {n} {things}?", "Give me a list of {n} {things}.",
    "Please list {n} {things}.", "Show me {n} {things}.", "Write down {n} {things}.",
)  # fmt: skip
_COUNT = (
    "Count from {a} to {b}.", "Count {a} to {b}.", "Can you count from {a} to {b}?",
    "List the numbers from {a} to {b}.", "Please count from {a} to {b}.",
    "Write the numbers from {a} to {b}.", "Give me the numbers {a} to {b}.", "Start at {a} and count to {b}.",
)  # fmt: skip
_SEQUENCES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("the days of the week", "all days of the week", "the weekdays in order", "the seven days"), words.DAYS),
    (("the months of the year", "all months", "the twelve months", "the months in order"), words.MONTHS),
    (("the seasons", "the four seasons", "the seasons of the year"), words.SEASONS),
    (("the letters of the alphabet", "the alphabet", "all letters", "the ABC"), words.LETTERS),
    (
        ("the planets", "all planets", "the planets of the solar system", "the eight planets"),
        words.CATEGORIES["planets"],
    ),
)
_RECITE = (
    "List {what}.", "Say {what}.", "What are {what}?", "Tell me {what}.", "Write {what}.", "Name {what}.",
    "Can you list {what}?", "Recite {what}.",
)  # fmt: skip
_AFTER = ("What comes after {x}?", "What is after {x}?", "Which one follows {x}?", "What follows {x}?")
_BEFORE = ("What comes before {x}?", "What is before {x}?", "Which one is just before {x}?")
_REPEAT = (
    "Repeat after me: {x}", "Repeat: {x}", "Say: {x}", "Please repeat this: {x}", "Say this back to me: {x}",
    'Repeat "{x}"', "Echo: {x}", 'Say "{x}"',
)  # fmt: skip
_REVERSE = (
    "Reverse this list: {x}",
    "Reverse the list {x}",
    "Turn this list around: {x}",
    "Write this list backwards: {x}",
    "Reverse: {x}",
)
_FIRST = ("What is the first word of: {x}", "Give me the first word: {x}", "First item of this list: {x}")
_LAST = ("What is the last word of: {x}", "Give me the last word: {x}", "Last item of this list: {x}")


def numbered(items: tuple[str, ...]) -> str:
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def _category(rng: random.Random) -> Exchange:
    things, items = rng.choice(tuple(words.CATEGORIES.items()))
    count = rng.choice((2, 3, 3, 3, 4, 5))
    shown = _COUNTS[count] if rng.random() < 0.65 else str(count)
    text = reword(rng.choice(_LIST).format(n=shown, things=things), rng)
    chosen = items[:count]
    if rng.random() < 0.3:
        text = text.rstrip(".?") + rng.choice(
            (" in one line.", " on one line.", ", comma separated.", ", separated by commas.")
        )
        return ask(SKILL, text, ", ".join(chosen), f"I need {count} {things} in one line.", rng)
    return ask(SKILL, text, numbered(chosen), f"I need {count} {things}. I number them from 1 to {count}.", rng)


def _count(rng: random.Random) -> Exchange:
    a = rng.choice((1, 1, rng.randint(0, 10), rng.randint(0, 40)))
    b = a + rng.randint(2, 12)
    numbers, template = range(a, b + 1), rng.choice(_COUNT)
    if rng.random() < 0.35:
        a, b, template = (
            b,
            a,
            rng.choice(
                ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Count from {a} down to {b}.")
            ),
        )
        numbers = range(a, b - 1, -1)
    answer = ", ".join(map(str, numbers))
    return ask(
        SKILL,
        reword(template.format(a=a, b=b), rng),
        answer,
        f"I start at {a} and stop at {b}.",
        rng,
        key=f"count {a} {b}",
    )


def _recite(rng: random.Random) -> Exchange:
    names, items = rng.choice(_SEQUENCES)
    text = reword(rng.choice(_RECITE).format(what=rng.choice(names)), rng)
    return ask(
        SKILL,
        text,
        ", ".join(items),
        f"I know this by heart: it starts with {items[0]} and ends with {items[-1]}.",
        rng,
    )


def _neighbour(rng: random.Random) -> Exchange:
    items = rng.choice((words.DAYS, words.MONTHS, words.LETTERS, words.LETTERS, tuple(map(str, range(51)))))
    place, after = rng.randrange(1, len(items) - 1), rng.random() < 0.6
    item = items[place]
    other = items[place + 1] if after else items[place - 1]
    noun = "the letter " if items is words.LETTERS else ""
    word = "after" if after else "before"
    text = reword(rng.choice(_AFTER if after else _BEFORE).format(x=noun + item), rng)
    return ask(
        SKILL, text, f"{other[0].upper()}{other[1:]} comes {word} {item}.", f"In order, {other} is {word} {item}.", rng
    )


def _repeat(rng: random.Random) -> Exchange:
    foreign = rng.choice((0.0,) * 24 + (0.3,))
    phrase = " ".join(
        rng.choice(words.FOREIGN) if rng.random() < foreign else words.a_word(rng) for _ in range(rng.randint(1, 5))
    )
    if rng.random() < 0.3:
        phrase = f"the {rng.choice(words.ADJECTIVES)} {rng.choice(words.COMMON)} is {rng.choice(words.ADJECTIVES)}"
    text = rng.choice(_REPEAT).format(x=phrase)
    return ask(WORD_SKILL, text, phrase, "I say exactly the same words.", rng, key=phrase)


def _reverse(rng: random.Random) -> Exchange:
    pool = rng.choice(
        (words.COMMON, rng.choice(tuple(words.CATEGORIES.values())), words.ADJECTIVES, tuple(map(str, range(1, 10))))
    )
    items = rng.sample(pool, rng.randint(2, 4))
    shown = ", ".join(items)
    answer = ", ".join(reversed(items))
    return ask(
        WORD_SKILL,
        rng.choice(_REVERSE).format(x=shown),
        answer,
        f"The last one is {items[-1]}, I start there.",
        rng,
        key=shown,
    )


def _end(rng: random.Random) -> Exchange:
    items = [words.a_word(rng) for _ in range(rng.randint(2, 5))]
    templates, answer, kind = rng.choice(((_FIRST, items[0], "first"), (_LAST, items[-1], "last")))
    template = rng.choice(templates)
    shown = (", " if "list" in template else " ").join(items)
    text = template.format(x=shown)
    return ask(WORD_SKILL, text, answer, f"I look at each: {', '.join(items)}.", rng, key=f"{kind} {shown}")


def draw(rng: random.Random) -> Exchange:
    return rng.choices((_category, _count, _recite, _neighbour), (36, 26, 10, 28))[0](rng)


def draw_copying(rng: random.Random) -> Exchange:
    return rng.choice((_repeat, _repeat, _reverse))(rng)


def draw_words(rng: random.Random) -> Exchange:
    return rng.choices((_repeat, _reverse, _end), (45, 30, 25))[0](rng)
