"""The vocabulary that the skills draw from, and a maker of words that nobody has seen.

Knows lists of words only. Does not know any prompt.
"""

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
    Ada Alan Alice Amir Anna Ben Bob Carla Carlos Chen Clara Daniel David Diana Elena Emil Emma Eva Felix Fatima
    Frank Grace Hana Henry Hugo Ida Ines Ivan Jack James Jana Jim John Julia Karim Kate Laura Lena Leo Lily
    Linda Lucas Lucy Maria Mark Marta Mary Max Maya Mia Mike Mila Nadia Nina Noah Nora Olga Oliver Omar Oscar
    Otto Paul Peter Priya Rosa Ruth Sam Sara Simon Sofia Tariq Theo Tim Tina Tom Vera Victor Wei Yuki Zoe
""")

CITIES = (
    *_words("""
        Paris London Berlin Madrid Rome Vienna Oslo Lisbon Dublin Prague Warsaw Athens Helsinki Stockholm Copenhagen
        Amsterdam Brussels Budapest Zurich Geneva Milan Naples Venice Lyon Munich Hamburg Barcelona Seville Porto
        Krakow Tokyo Kyoto Osaka Seoul Beijing Shanghai Delhi Mumbai Bangkok Hanoi Singapore Sydney Melbourne Cairo
        Nairobi Lagos Toronto Montreal Vancouver Boston Chicago Seattle Denver Austin Miami Lima Bogota Santiago
        Quito Havana
    """),
    "New York", "San Francisco", "Los Angeles", "Mexico City", "Rio de Janeiro", "Buenos Aires", "Cape Town",
)  # fmt: skip

COUNTRIES = {
    "France": "Paris", "England": "London", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome",
    "Austria": "Vienna",
    "Norway": "Oslo", "Portugal": "Lisbon", "Ireland": "Dublin", "Poland": "Warsaw", "Greece": "Athens",
    "Finland": "Helsinki",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Belgium": "Brussels", "Hungary": "Budapest", "Japan": "Tokyo",
    "South Korea": "Seoul", "China": "Beijing", "India": "Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Egypt": "Cairo",
    "Kenya": "Nairobi", "Peru": "Lima", "Colombia": "Bogota", "Chile": "Santiago", "Cuba": "Havana", "Canada": "Ottawa",
    "Mexico": "Mexico City",
}  # fmt: skip

CATEGORIES: dict[str, tuple[str, ...]] = {
    "fruits": ("apple", "banana", "cherry", "orange", "pear", "grape", "mango", "plum"),
    "colours": ("red", "blue", "green", "yellow", "orange", "purple", "black", "white"),
    "animals": ("cat", "dog", "horse", "fox", "bear", "rabbit", "lion", "wolf"),
    "vegetables": ("carrot", "potato", "tomato", "onion", "pea", "bean", "cabbage", "leek"),
    "birds": ("robin", "owl", "eagle", "crow", "swan", "duck", "heron", "sparrow"),
    "trees": ("oak", "pine", "birch", "maple", "willow", "elm", "beech", "ash"),
    "drinks": ("water", "tea", "coffee", "milk", "juice", "lemonade", "cocoa", "soda"),
    "tools": ("hammer", "saw", "drill", "wrench", "pliers", "screwdriver", "chisel", "file"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "languages": ("English", "Spanish", "French", "German", "Italian", "Chinese", "Japanese", "Arabic"),
    "sports": ("football", "tennis", "swimming", "running", "chess", "rowing", "skiing", "boxing"),
    "countries": ("France", "Germany", "Spain", "Italy", "Japan", "India", "Brazil", "Canada"),
    "metals": ("iron", "copper", "silver", "gold", "tin", "lead", "zinc", "nickel"),
    "instruments": ("piano", "violin", "flute", "guitar", "drum", "trumpet", "harp", "cello"),
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = _words("""
    January February March April May June July August September October November December
""")
SEASONS = ("spring", "summer", "autumn", "winter")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")

COMMON = _words("""
    apple baby ball bank bell bird boat book bottle box bread bridge brother brush butter button cake candle car
    card castle chair city clock cloud coat coin corner cup desk doctor door dream engine farm field fire fish
    flower forest friend garden gate glass gold grass hammer hand hat heart hill home honey house island key
    kitchen ladder lake lamp leaf letter light map market meadow mirror money moon morning mountain music night
    ocean paper path pencil picture pocket queue rain river road rocket roof room rope salt school sea shadow
    shell ship shoe silver sky snow spoon spring star station stone storm street sugar summer sun table token
    tower town train tree valley village wagon wall water wheel wind window winter wood word yard
""")

ADJECTIVES = _words("""
    bright brave busy calm clever cold curious dark deep early fast gentle golden green happy heavy kind large
    little loud lucky merry narrow new odd old patient plain proud quick quiet red round sharp shy silent simple
    slow small soft strong sweet tall tiny warm wide wild wise young
""")

# Many, so that a word has to be read to be said again: of few, the likely one can be guessed.
MORE = _words("""
    animal answer arrow artist badge bag barrel basin basket beach bed bee beetle berry bonus border bow bowl brain
    broom cabin camel canal canoe canyon cell chain chart chest chip circle coal cobweb comet copy crane crown dawn
    desert drawer dust error event fabric face ferry flame fleet flight flood floor flour frame frog fruit garlic gem
    giant ginger globe glove goose gravel guard guide hare hay hedge herb hero hook hour hunter ink iris ivory jacket
    jewel jigsaw kite kitten knee lace lamb lesson lid linen lock lunch maid mast medal mint model moth mouse mug
    muscle napkin neck net note office olive page palace park parrot paste patch pebble piece pigeon pillow pirate
    pitch pond pony poppy port pot powder prince prize puddle pump puppet puppy purse quarry radio raft razor reef
    robot root ruby rug ruler sack sauce screen shirt shop sink sled soap sock spear squid stage stair stamp stem
    stick stool straw string suit swamp tank tent theme thread thumb timber toast toe torch toy track tray truck
    tunnel turkey turtle twig uncle van wallet wasp wave wax whale wing wire witch wool worm zipper
""")

NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)

# Beyond ASCII: the tokenizer falls back to bytes here, and the model learns to copy bytes.
FOREIGN = _words("""
    café naïve señor Zürich Malmö façade über привет мир спасибо 你好 世界 谢谢 こんにちは ありがとう 안녕 γειά 
    🎉 🚂 😀 👍 🌍 ❤ 🐱 ☕
""")

_STARTS = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "qu",
    "r",
    "s",
)
_MORE_STARTS = ("sh", "sk", "st", "t", "th", "tr", "v", "w", "x", "y", "z", "", "sp", "gl")
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "oo", "ou", "ie")
_ENDS = ("", "", "", "n", "r", "l", "s", "t", "m", "nd", "rk", "ck", "x", "sh", "ng", "p", "b", "th", "st")


def made_up_word(rng: random.Random) -> str:
    """A word of two or three syllables; most have never occurred before, so they can only be copied, not remembered."""
    syllables = (
        rng.choice(_STARTS + _MORE_STARTS) + rng.choice(_VOWELS) + rng.choice(_ENDS)
        for _ in range(rng.choice((1, 2, 2, 2, 3)))
    )
    return "".join(syllables) or "ox"


def a_name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.95 else made_up_word(rng).capitalize()


def a_city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.96 else made_up_word(rng).capitalize()


def a_word(rng: random.Random) -> str:
    if rng.random() < 0.02:
        return made_up_word(rng)
    return rng.choice(rng.choice((COMMON, ADJECTIVES, CATEGORIES["animals"], MORE, MORE)))


def a_phrase(rng: random.Random) -> str:
    """One to three words."""
    return " ".join(a_word(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def joined(items: tuple[str, ...] | list[str]) -> str:
    """ "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
