"""Skill: short stories of 150 to 250 tokens, so that streaming is visible.

Knows the parts that a story is put together from.
"""

import random

from demo_model import words
from demo_model.exchange import Check, Exchange, assistant, reword, user

SKILL = "stories"

HEROES = (
    "fox",
    "cat",
    "dog",
    "bear",
    "rabbit",
    "owl",
    "horse",
    "mouse",
    "robot",
    "duck",
    "wolf",
    "lion",
    "train",
    "dragon",
    "turtle",
    "bird",
)
_PLACES = ("forest", "valley", "village", "meadow", "harbour", "mountain", "garden", "station", "island", "castle")
_OBJECTS = ("key", "lantern", "map", "bell", "letter", "coin", "box", "mirror", "book", "ladder", "ticket", "whistle")
_TRAITS = ("brave", "curious", "quiet", "patient", "clever", "kind", "lively", "gentle")
_OPENINGS = (
    "Once upon a time, there was",
    "Long ago, there lived",
    "In a far country there lived",
    "One spring there was",
)
_MIDDLES = (
    "The path was long and the night was cold, but {n} did not give up.",
    "It rained for three days, and {n} waited under an old oak.",
    "{n} asked everybody on the way, and nobody knew the answer.",
    "At the river the bridge was broken, so {n} built a small boat.",
    "A strong wind came from the hills and blew the map away.",
    "{n} counted the stars to find the right way.",
)
_HELPS = (
    'There {n} met an old {f}. "I can help you," said the {f}, "but first you must tell me a true story." '
    "{n} told one, and the {f} smiled.",
    'There a small {f} sat in the grass. "Why are you so sad?" asked {n}. "I have lost my way," said the {f}. '
    "So they went on together.",
    'There {n} found a tired {f} and shared the last bread. "Thank you," said the {f}. "I know a secret road."',
)
_ENDINGS = (
    "In the evening the {o} lay in front of them, shining in the light of the moon. "
    "They took it home, and the whole {p} came to see it.",
    "When the sun rose, they found the {o} under a white stone. {n} laughed, and the {f} danced on the road.",
    "At last the {o} was found, behind the oldest door of the {p}. "
    "All the bells rang, and there was cake for everyone.",
)
_LESSONS = (
    "From that day on {n} was never alone again.",
    "And {n} learned that a friend is worth more than gold.",
    "And every year they told the story of that day.",
    "After that, {n} slept well every night.",
)

_PLAIN = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "I want to hear a story.",
    "Can you tell me a story?", "Write a short story.",
    "Please tell a story.", "Tell a story for children.", "A story, please.", "Make up a story.", "Read me a story.",
    "Write me a story.", "Tell me another story.",
    "Tell me a long story.", "Write a long story.",
)  # fmt: skip
_ABOUT = (
    "Tell me a story about {x}.", "Write a story about {x}.", "Write a short story about {x}.",
    "Can you tell me a story about {x}?", "Make up a story about {x}.",
    "I want a story about {x}.", "Tell me a short story about {x}.", "Once more, a story about {x}.",
)  # fmt: skip


def story(rng: random.Random, hero: str, name: str) -> str:
    parts = {
        "n": name,
        "p": rng.choice(_PLACES),
        "o": rng.choice(_OBJECTS),
        "f": rng.choice([f for f in HEROES if f != hero]),
    }
    middle = rng.sample(_MIDDLES, 2)
    trait = rng.choice(_TRAITS)
    first = (
        f"{rng.choice(_OPENINGS)} {words.with_article(trait)} {hero} named {name}. "
        f"{name} lived in a small house near the {parts['p']}. "
        f"Every morning {name} looked out of the window and dreamed of a golden {parts['o']}."
    )
    second = f"One day {name} packed a bag and left the {parts['p']}. {middle[0]} {rng.choice(_HELPS)}".format(**parts)
    third = f"{middle[1]} {rng.choice(_ENDINGS)} {rng.choice(_LESSONS)}".format(**parts)
    return f"{first}\n\n{second}\n\n{third}\n\nThe end."


def _told(hero: str, name: str) -> Check:
    """Long enough, about the right hero, in three paragraphs, and finished."""

    def check(text: str) -> bool:
        return (
            len(text) > 400
            and f"{hero} named {name}" in text
            and text.strip().endswith("The end.")
            and text.count("\n\n") == 3
        )

    return check


def draw(rng: random.Random) -> Exchange:
    hero, name = rng.choice(HEROES), words.a_name(rng)
    kind = rng.random()
    if kind < 0.35:
        text, wanted = reword(rng.choice(_PLAIN), rng), ("", "")
    elif kind < 0.65:
        text, wanted = reword(rng.choice(_ABOUT).format(x=words.with_article(hero)), rng), (hero, "")
    else:
        about = rng.choice((f"{words.with_article(hero)} named {name}", f"{words.with_article(hero)} called {name}"))
        text, wanted = reword(rng.choice(_ABOUT).format(x=about), rng), (hero, name)
    thought = f"The hero is {words.with_article(hero)}. The name is {name}. There is a journey and a good end."
    key = f"{hero} {name}" if kind >= 0.65 else text
    return Exchange(SKILL, key, (user(text), assistant(story(rng, hero, name), thought)), _told(*wanted))
