"""Skill: small sums. Addition and subtraction of 0..50, tables up to 10, comparing, even and odd.

Knows how to work a sum out digit by digit (the thought). Sums of two operands are held out by their operands,
so the model has to
add; tables are held out by wording, because a table can only be known by heart.
"""

import random

from demo_model.exchange import Exchange, ask, reword

SKILL = "arithmetic"
LARGEST = 50

_ADD = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "What is {a} plus {b}?", "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.", "What's {a} + {b}?", "Compute {a} plus {b}.", "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "What does {a} + {b} make?", "Please tell me {a} + {b}.", "What is {a}+{b}?",
)  # fmt: skip
_SUBTRACT = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "What is {a} minus {b}?", "Subtract {b} from {a}.",
    "How much is {a} - {b}?", "Calculate {a} - {b}.", "What's {a} - {b}?", "Compute {a} minus {b}.",
    "Take {b} away from {a}.",
    "What is the difference between {a} and {b}?", "Please tell me {a} - {b}.", "What is {a}-{b}?",
)  # fmt: skip
_MULTIPLY = (
    "What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "What is {a} times {b}?", "Multiply {a} by {b}.",
    "{a} × {b} = ?",
    "How much is {a} times {b}?", "Calculate {a} * {b}.", "What's {a} x {b}?", "What is the product of {a} and {b}?",
    "What is {a} × {b}?",
)  # fmt: skip
_LARGER = ("Which is larger, {a} or {b}?", "Which number is bigger, {a} or {b}?", "What is greater: {a} or {b}?")
_SMALLER = ("Which is smaller, {a} or {b}?", "Which number is less, {a} or {b}?")
_PARITY = ("Is {a} even or odd?", "Is {a} odd or even?", "Is the number {a} even?", "Tell me if {a} is even or odd.")
_THINGS = (
    "apples",
    "books",
    "coins",
    "cards",
    "eggs",
    "pens",
    "stones",
    "stamps",
    "shells",
    "cookies",
    "tokens",
    "marbles",
)


def add_thought(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    note = f"write {ones % 10}, carry {carry}" if carry else f"write {ones}"
    return f"Ones: {a % 10} + {b % 10} = {ones}, {note}. Tens: {a // 10} + {b // 10} + {carry} = {tens}. So {a + b}."


def subtract_thought(a: int, b: int) -> str:
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow - b % 10
    note = ", borrow 1" if borrow else ""
    tens = f"Tens: {a // 10} - {b // 10} - {borrow} = {(a - b) // 10}."
    return f"Ones: {a % 10 + 10 * borrow} - {b % 10} = {ones}{note}. {tens} So {a - b}."


def _operand(rng: random.Random) -> int:
    return rng.randint(0, LARGEST) if rng.random() < 0.75 else rng.randint(0, 20)


def _addition(rng: random.Random) -> Exchange:
    a, b = _operand(rng), _operand(rng)
    text = reword(rng.choice(_ADD).format(a=a, b=b), rng)
    return ask(SKILL, text, f"{a} + {b} = {a + b}.", add_thought(a, b), rng, key=f"{min(a, b)}+{max(a, b)}")


def _subtraction(rng: random.Random) -> Exchange:
    b, a = sorted((_operand(rng), _operand(rng)))
    text = reword(rng.choice(_SUBTRACT).format(a=a, b=b), rng)
    return ask(SKILL, text, f"{a} - {b} = {a - b}.", subtract_thought(a, b), rng, key=f"{a}-{b}")


def _multiplication(rng: random.Random) -> Exchange:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    text = reword(rng.choice(_MULTIPLY).format(a=a, b=b), rng)
    return ask(SKILL, text, f"{a} × {b} = {a * b}.", f"I know the table: {a} times {b} is {a * b}.", rng)


def _word_problem(rng: random.Random) -> Exchange:
    a, b, things = _operand(rng), _operand(rng), rng.choice(_THINGS)
    if rng.random() < 0.5:
        text = rng.choice((
            f"I have {a} {things} and get {b} more. How many {things} do I have?",
            f"I have {a} {things}. I buy {b} more. How many do I have now?",
            f"There are {a} {things} here and {b} {things} there. How many {things} is that?",
        ))  # fmt: skip
        answer = f"{a} + {b} = {a + b}."
        return ask(SKILL, text, answer, f"I must add. {add_thought(a, b)}", rng, key=f"{min(a, b)}+{max(a, b)}")
    b, a = sorted((a, b))
    text = rng.choice((
        f"I have {a} {things} and give away {b}. How many {things} are left?",
        f"I had {a} {things} and lost {b}. How many do I have now?",
    ))  # fmt: skip
    answer = f"{a} - {b} = {a - b}."
    return ask(SKILL, text, answer, f"I must subtract. {subtract_thought(a, b)}", rng, key=f"{a}-{b}")


def _comparison(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(100), 2)
    larger = rng.random() < 0.6
    text = reword(rng.choice(_LARGER if larger else _SMALLER).format(a=a, b=b), rng)
    winner = max(a, b) if larger else min(a, b)
    word = "larger" if larger else "smaller"
    return ask(
        SKILL,
        text,
        f"{winner} is {word}.",
        f"I compare {a} and {b}: {winner} is {word}.",
        rng,
        key=f"{a}?{b}",
    )


def _parity(rng: random.Random) -> Exchange:
    a = rng.randint(0, 99)
    word = "odd" if a % 2 else "even"
    text = reword(rng.choice(_PARITY).format(a=a), rng)
    return ask(SKILL, text, f"{a} is {word}.", f"The last digit of {a} is {a % 10}, so {a} is {word}.", rng)


def draw_equation(rng: random.Random) -> Exchange:
    """A sum whose answer is a whole equation."""
    return rng.choices((_addition, _subtraction, _multiplication), (45, 40, 15))[0](rng)


_KINDS = (_addition, _subtraction, _multiplication, _word_problem, _comparison, _parity)


def draw(rng: random.Random) -> Exchange:
    return rng.choices(_KINDS, (32, 30, 14, 12, 7, 5))[0](rng)
