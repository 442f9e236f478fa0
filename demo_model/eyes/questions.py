"""What people ask about a picture, and the answers.

Knows wordings. Does not know how pictures are drawn, nor the model.
"""

import random
from collections.abc import Sequence

from demo_model.exchange import reword
from demo_model.eyes.pictures import Picture

VOWELS = "aeiou"
DESCRIBE = (
    "Describe the picture.", "Describe this picture.", "What is in the picture?", "What is in this picture?",
    "Describe the image.", "Describe this image.", "What is in the image?", "What is in this image?",
    "What do you see?", "What is this?", "What does the picture show?",
)  # fmt: skip
COLOUR = ("What colour is it?", "Which colour is it?", "What color is it?", "What is the colour?")
DIGIT = ("What digit is this?", "Which digit is it?", "What number is this?", "Which digit do you see?")
SHAPE = ("What shape is this?", "Which shape is it?", "What shape do you see?")
WORD = ("What does it say?", "What is written here?", "Which word is this?", "Read the word.", "What word is it?")
HIGHEST = ("Which bar is the highest?", "Which bar is the tallest?", "Which bar is the longest?")
COUNT = ("How many bars are there?", "How many bars do you see?", "Count the bars.")


def described(picture: Picture) -> str:
    """The sentence that describes a picture."""
    if picture.kind == "digit":
        return f"It is the digit {picture.subject} in {picture.colour}."
    if picture.kind == "word":
        return f'It is the word "{picture.subject}" in {picture.colour}.'
    if picture.kind == "shape":
        return f"It is {'an' if picture.colour[0] in VOWELS else 'a'} {picture.colour} {picture.subject}."
    if picture.kind == "colour":
        return f"It is the colour {picture.colour}."
    return f"It is a chart with {picture.subject} bars."


def choices(picture: Picture) -> list[tuple[Sequence[str], str]]:
    """Wordings of each question that a picture allows, with its answer."""
    found: list[tuple[Sequence[str], str]] = [(DESCRIBE, described(picture))]
    if picture.kind == "chart":
        found.append((HIGHEST, f"It is the {picture.highest} bar."))
        found.append((COUNT, f"There are {picture.subject} bars."))
        return found
    found.append((COLOUR, f"It is {picture.colour}."))
    if picture.kind == "digit":
        found.append((DIGIT, f"It is the digit {picture.subject}."))
    elif picture.kind == "word":
        found.append((WORD, f'It says "{picture.subject}".'))
    elif picture.kind == "shape":
        found.append((SHAPE, described(picture)))
    return found


def ask(picture: Picture, rng: random.Random) -> tuple[str, str]:
    """A question about a picture, and its answer."""
    wordings, answer = rng.choice(choices(picture))
    return reword(rng.choice(wordings), rng), answer
