"""Skill: remembering what the user said earlier in the conversation.

Knows a few personal facts. The later question may come many turns on.
"""

import random

from demo_model import words
from demo_model.exchange import Exchange, Message, ask, assistant, equals, reword, user

SKILL = "memory"

_NAME = (
    "My name is {x}.",
    "I am {x}.",
    "I'm {x}.",
    "Hi, I am {x}.",
    "Hello, my name is {x}.",
    "Call me {x}.",
    "Hello! I'm {x}.",
    "My name is {x}, nice to meet you.",
)
_NAME_ASKED = (
    "What is my name?",
    "What's my name?",
    "Do you remember my name?",
    "Who am I?",
    "Tell me my name.",
    "Do you know my name?",
    "What did I say my name is?",
)
_FACTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str]] = {
    "colour": (
        ("My favourite colour is {x}.", "I like the colour {x} best.", "The colour I like is {x}."),
        "I will remember that you like {x}.",
        ("What is my favourite colour?", "Which colour do I like?", "What colour do I like best?"),
        "Your favourite colour is {x}.",
    ),
    "city": (
        ("I live in {x}.", "My home is in {x}.", "I come from {x}.", "I am from {x}."), "{x} is a nice place to live.",
        ("Where do I live?", "Which city do I live in?", "What is my city?", "Where am I from?"), "You live in {x}.",
    ),
    "pet": (
        ("My pet is called {x}.", "I have a pet named {x}.", "My pet's name is {x}."), "{x} is a good name for a pet.",
        ("What is my pet called?", "What is the name of my pet?", "How is my pet called?"), "Your pet is called {x}.",
    ),
    "food": (
        ("I like to eat {x}.", "My favourite food is {x}.", "I love {x}."), "I will remember that you like {x}.",
        ("What do I like to eat?", "What is my favourite food?", "Which food do I like?"), "You like to eat {x}.",
    ),
    "number": (
        ("My lucky number is {x}.", "Remember the number {x}.", "The number is {x}."),
        "I will remember the number {x}.",
        ("What is my number?", "Which number did I tell you?", "What is my lucky number?", "What was the number?"),
        "Your number is {x}.",
    ),
}  # fmt: skip


def _value(fact: str, rng: random.Random) -> str:
    if fact == "colour":
        return rng.choice(words.CATEGORIES["colours"])
    if fact == "city":
        return words.a_city(rng)
    if fact == "pet":
        return words.a_name(rng)
    return (
        str(rng.randint(0, 999))
        if fact == "number"
        else rng.choice(words.CATEGORIES["fruits"] + words.CATEGORIES["vegetables"])
    )


def draw_parts(rng: random.Random) -> tuple[tuple[Message, Message], tuple[Message, Message], str]:
    """The statement with its acknowledgement, the later question with its answer, and the key."""
    if rng.random() < 0.5:
        name = words.a_name(rng)
        told = (
            user(reword(rng.choice(_NAME).format(x=name), rng)),
            assistant(f"Nice to meet you, {name}!", f"The user is called {name}."),
        )
        asked = (
            user(reword(rng.choice(_NAME_ASKED), rng)),
            assistant(f"Your name is {name}.", f"The user said that the name is {name}."),
        )
        return told, asked, name
    fact = rng.choice(tuple(_FACTS))
    tellings, heard, questions, answer = _FACTS[fact]
    value = _value(fact, rng)
    told = (
        user(reword(rng.choice(tellings).format(x=value), rng)),
        assistant(heard.format(x=value), f"The user tells me about {value}."),
    )
    asked = (
        user(reword(rng.choice(questions), rng)),
        assistant(answer.format(x=value), f"The user told me before: {value}."),
    )
    return told, asked, f"{fact} {value}"


def recall(
    parts: tuple[tuple[Message, Message], tuple[Message, Message], str], between: tuple[Message, ...]
) -> Exchange:
    told, asked, key = parts
    return Exchange(SKILL, key, (*told, *between, *asked), equals(asked[1]["content"]))


def draw(rng: random.Random) -> Exchange:
    if rng.random() < 0.06:
        return ask(
            SKILL,
            reword(rng.choice(_NAME_ASKED), rng),
            "You have not told me your name yet.",
            "No name was said so far.",
            rng,
        )
    return recall(draw_parts(rng), ())
