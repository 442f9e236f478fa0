"""Skill: saying that it does not know.

Knows the shape of questions beyond a very small model. The subjects are mostly made up.
"""

import random

from demo_model import words
from demo_model.exchange import Exchange, ask, reword

SKILL = "unknown"

REPLY = "I am a very small demo model, so I do not know that. I can do small sums, lists, JSON, tools and stories."

_QUESTIONS = (
    "Who is {p}?", "Who was {p}?", "When was {p} born?", "What is the meaning of {w}?", "Explain {w} to me.",
    "What is the history of {c}?",
    "Write a poem about {w}.", "Write an essay about {w}.", "Who won the {w} cup?", "What is the best {w}?",
    "How do I repair a {w}?",
    "Translate {w} into French.", "How many people live in {c}?", "What is the price of a {w}?", "Why is the {w} {a}?",
    "How does a {w} work?",
    "Who invented the {w}?", "What should I cook with {w}?", "How far is it from {c} to {d}?",
    "Who is the president of {c}?", "What is the news about {w}?",
    "Where can I buy a {w}?", "What is the square root of {n}?", "Is {p} married?", "What is the tallest {w}?",
    "Recommend a film about {w}.",
    "How do I learn {w}?", "What do you think about {w}?", "Prove that {w} is {a}.", "Solve this riddle about a {w}.",
    "Summarise the book {w} {v}.",
    "What is the theory of {w}?", "Tell me about {c}.", "Tell me about {p}.", "What is {w}?", "What is a {w}?",
    "What does {w} mean?",
    "What is the capital of {x}?", "Can you fix my {w}?", "Why do {w}s {v}?", "Write a song about {w}.",
    "Plan my trip to {c}.",
    "Give me advice about {w}.", "How old is {p}?", "How tall is {p}?", "What is the recipe for {w} {v}?",
    "Sing a {w} song.", "Draw a {w}.",
    "What is the population of {c}?", "What happened in {y}?", "When did the {w} war end?", "Which {w} is {a}?",
    "How heavy is a {w}?", "Spell {w}.", "How do you spell {w}?",
)  # fmt: skip


_KNOWN = frozenset(("token", "train", "engine"))


def _unfamiliar(rng: random.Random) -> str:
    word = words.a_word(rng)
    return word if word not in _KNOWN else words.made_up_word(rng)


def draw(rng: random.Random) -> Exchange:
    text = rng.choice(_QUESTIONS).format(
        p=f"{words.a_name(rng)} {words.made_up_word(rng).capitalize()}",
        w=_unfamiliar(rng),
        v=words.a_word(rng),
        c=words.a_city(rng),
        d=words.a_city(rng),
        a=rng.choice(words.ADJECTIVES),
        n=rng.randint(100, 9999),
        x=words.made_up_word(rng).capitalize(),
        y=rng.randint(1000, 2020),
    )
    return ask(SKILL, reword(text, rng), REPLY, "This is beyond a very small model. I say so politely.", rng)
