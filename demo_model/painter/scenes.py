"""What the painter can paint, and the words that ask for it.

A scene is a thing with a colour and a place before a colour, or one or two in a landscape. Knows English; does not know
pixels.
"""

import random
from dataclasses import dataclass, replace

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (215, 40, 40),
    "orange": (245, 140, 25),
    "yellow": (245, 220, 45),
    "green": (45, 165, 65),
    "blue": (45, 85, 215),
    "purple": (135, 50, 170),
    "pink": (250, 150, 190),
    "brown": (125, 75, 40),
    "black": (20, 20, 20),
    "grey": (128, 128, 128),
    "white": (248, 248, 248),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "heart", "diamond")
DIGITS = tuple("0123456789")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Things of the world, with the colour that they have where none is named.
STANDING = {"house": "red", "tree": "green", "flower": "pink", "boat": "brown", "car": "red"}
FLYING = {"sun": "yellow", "moon": "yellow", "cloud": "white"}
FACES = {"face": "yellow"}
THINGS = {**STANDING, **FLYING, **FACES}
SYMBOLS = (*SHAPES, *DIGITS, *THINGS)
# Above and below the horizon.
LANDSCAPES: dict[str, tuple[Colour, Colour]] = {
    "meadow": ((150, 205, 250), (90, 190, 80)),
    "sea": ((165, 215, 250), (40, 100, 190)),
    "snow": ((185, 210, 235), (240, 245, 250)),
    "desert": ((175, 215, 245), (235, 200, 130)),
    "night": ((20, 22, 60), (35, 60, 45)),
}
PAPER = "paper"
_LANDSCAPE_WORDS = {
    "meadow": ("in a meadow", "on the grass", "on grass", "in a field", "in the meadow"),
    "sea": ("at sea", "on the sea", "by the sea", "on the water", "at the sea"),
    "snow": ("in the snow", "in winter", "on snow"),
    "desert": ("in the desert", "on sand", "in a desert"),
    "night": ("at night", "in the night", "in the dark"),
}
_PLACES = {
    (0, 0): ("top left",), (1, 0): ("top",), (2, 0): ("top right",),
    (0, 1): ("left",), (1, 1): ("middle", "centre", "center"), (2, 1): ("right",),
    (0, 2): ("bottom left",), (1, 2): ("bottom",), (2, 2): ("bottom right",),
}  # fmt: skip
_BEGINNINGS = (
    "a picture of", "a drawing of", "an image of", "draw", "paint", "please draw", "please paint", "show me",
    "i want", "a photo of", "generate", "make", "can you draw",
)  # fmt: skip
_ENDINGS = (".", "!", "please", ", simple")
# What no drawing has: the painter learns to look past it.
_STRANGERS = ("cat", "beautiful", "very", "train", "with", "style", "nice", "detailed")
# How far from its background the colour of a thing is at least, summed over the channels.
_CONTRAST = 190
# Share of the scenes that are landscapes, and of the others that have their thing in the middle.
_LANDSCAPE_SHARE = 0.2
_MIDDLE_SHARE = 0.5


@dataclass(frozen=True)
class Thing:
    """`column` and `row` are 0, 1 or 2, from the top left."""

    symbol: str
    colour: str
    column: int = 1
    row: int = 1


@dataclass(frozen=True)
class Scene:
    """One or two things before a colour, a landscape, or paper, which is white unless the thing is."""

    things: tuple[Thing, ...]
    background: str


def is_seen(colour: str, background: str) -> bool:
    """Whether a thing of this colour can be seen there."""
    behind = LANDSCAPES.get(background) or (COLOURS["white" if background == PAPER else background],)
    return all(sum(abs(a - b) for a, b in zip(COLOURS[colour], each, strict=True)) >= _CONTRAST for each in behind)


def random_scene(rng: random.Random) -> Scene:
    """Draw a scene that the words can say."""
    if rng.random() < _LANDSCAPE_SHARE:
        return _landscape(rng)
    symbol = rng.choice(SYMBOLS)
    column, row = (1, 1) if rng.random() < _MIDDLE_SHARE else (rng.randrange(3), rng.randrange(3))
    thing = Thing(symbol, _colour(rng, symbol), column, row)
    return Scene((thing,), _background(rng, thing))


def words_of(rng: random.Random, scene: Scene) -> str:
    """Say a scene in one of many ways. What is as usual may be left out."""
    first = scene.things[0]
    if len(scene.things) == 1:
        text = f"{_named(rng, first)} {_place(rng, first) if not _flies(scene) else ''}".strip()
    else:
        text = _related(rng, *scene.things)
    background = scene.background
    if background in LANDSCAPES:
        text = f"{text} {rng.choice(_LANDSCAPE_WORDS[background])}"
    elif background != PAPER:
        text += rng.choice((f" on a {background} background", f" on {background}", f", {background} background"))
    if rng.random() < 0.5:
        text = f"{rng.choice(_BEGINNINGS)} {text}"
    if rng.random() < 0.2:
        text = f"{text} {rng.choice(_ENDINGS)}"
    if rng.random() < 0.1:
        words = text.split()
        words.insert(rng.randrange(len(words)), rng.choice(_STRANGERS))
        text = " ".join(words)
    return text


def vocabulary() -> list[str]:
    """Return all words that a scene may be said with, but for those that no drawing has."""
    texts = [
        *COLOURS, *SHAPES, *DIGITS, *NUMBERS, *THINGS, "gray", "colour", "of", "the", "a", "an", "in", "on", "at",
        "and", "to", "background", "digit", "number", "corner", "side", "below", "under", "smiling", "smiley",
        *_BEGINNINGS, *_ENDINGS,
        *(word for words in _LANDSCAPE_WORDS.values() for word in words),
        *(word for words in _PLACES.values() for word in words),
    ]  # fmt: skip
    return list(dict.fromkeys(word for text in texts for word in text.replace(",", ", ").split()))


def _landscape(rng: random.Random) -> Scene:
    """Something on the ground, in the sky, or both."""
    background = rng.choice(tuple(LANDSCAPES))
    standing = [Thing(name, usual if rng.random() < 0.5 else _colour(rng, name)) for name, usual in STANDING.items()]
    flying = [Thing(name, usual) for name, usual in FLYING.items()]
    down, up = (
        rng.choice([thing for thing in things if _stands_out(thing, background)] or [None])
        for things in (standing, flying)
    )
    columns = rng.sample(range(3), 2)
    placed = [
        replace(thing, column=columns[i], row=row) for i, (thing, row) in enumerate(((down, 2), (up, 0))) if thing
    ]
    if not placed:
        return _landscape(rng)
    if rng.random() < 0.5 or len(placed) == 1:
        return Scene((replace(rng.choice(placed), column=1),), background)
    return Scene(tuple(placed), background)


def _stands_out(thing: Thing, background: str) -> bool:
    """Whether a thing can be seen where it is in a landscape: on the ground before both, in the sky before that."""
    behind = LANDSCAPES[background][: 1 if thing.symbol in FLYING else 2]
    least = _CONTRAST // 2
    return all(sum(abs(a - b) for a, b in zip(COLOURS[thing.colour], each, strict=True)) >= least for each in behind)


def _colour(rng: random.Random, symbol: str) -> str:
    usual = THINGS.get(symbol)
    return usual if usual and rng.random() < 0.4 else rng.choice(tuple(COLOURS))


def _background(rng: random.Random, thing: Thing) -> str:
    fitting = [name for name in COLOURS if is_seen(thing.colour, name)]
    if is_seen(thing.colour, PAPER) and rng.random() < 0.7:
        return PAPER
    return rng.choice(fitting)


def _flies(scene: Scene) -> bool:
    """Whether the place of the only thing goes without saying."""
    return scene.background in LANDSCAPES


def _named(rng: random.Random, thing: Thing) -> str:
    """A thing with its colour."""
    symbol, colour = thing.symbol, thing.colour.replace("grey", rng.choice(("grey", "gray")))
    if THINGS.get(symbol) == thing.colour and rng.random() < 0.5:
        colour = ""
    if symbol in DIGITS:
        symbol = rng.choice((symbol, symbol, NUMBERS[int(symbol)]))
        symbol = rng.choice((symbol, symbol, f"digit {symbol}", f"number {symbol}"))
    elif symbol == "face":
        symbol = rng.choice(("face", "smiling face", "smiley"))
    article = rng.choice(("a", "a", "a", "the", ""))
    if colour and rng.random() < 0.08:
        return _with_article(article, [symbol, "in", colour])
    return _with_article(article, [colour, symbol])


def _with_article(article: str, words: list[str]) -> str:
    text = " ".join(word for word in words if word)
    return f"{article}{'n' if article == 'a' and text[0] in 'aeiou' else ''} {text}".strip()


def _place(rng: random.Random, thing: Thing) -> str:
    names = _PLACES[thing.column, thing.row]
    name = rng.choice(names)
    if (thing.column, thing.row) == (1, 1):
        return rng.choice(("", "", f"in the {name}"))
    if thing.column != 1 and thing.row != 1:
        return rng.choice((f"in the {name} corner", f"at the {name}", f"in the {name}", f"on the {name}"))
    if thing.row == 1:
        return rng.choice((f"on the {name}", f"at the {name}", f"on the {name} side", f"to the {name}"))
    return rng.choice((f"at the {name}", f"on the {name}", f"in the {name}"))


def _related(rng: random.Random, down: Thing, up: Thing) -> str:
    """One thing on the ground, and one in the sky."""
    return f"{_named(rng, down)} {rng.choice(('and', 'under', 'below'))} {_named(rng, up)}"
