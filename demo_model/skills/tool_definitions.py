"""The tools that conversations offer: a few usual ones, and any number of made-up ones.

Knows how to write a tool's JSON schema in the ways that people write them. Does not know what users ask (see
`tool_use`).
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from demo_model import words
from demo_model.exchange import Message

_VERBS = (
    "add", "book", "buy", "cancel", "check", "clean", "close", "copy", "count", "create", "delete", "draw", "fetch",
    "find", "get", "list", "load",
    "lock", "make", "mark", "move", "open", "order", "paint", "play", "print", "read", "record", "remove", "rename",
    "save", "sell", "send", "set",
    "share", "show", "sort", "start", "stop", "store", "track", "turn_on", "update", "write",
)  # fmt: skip
_NOUNS = (
    "account", "alarm", "article", "bill", "booking", "calendar", "contact", "document", "email", "event", "file",
    "flight", "folder", "invoice", "item",
    "lamp", "meeting", "message", "note", "order", "package", "photo", "playlist", "product", "project", "recipe",
    "record", "reminder", "report", "room",
    "seat", "song", "stock", "table", "task", "ticket", "timer", "train", "user", "video", *words.COMMON, *words.MORE,
)  # fmt: skip
_TEXT_ARGUMENTS = (
    "title", "name", "text", "message", "city", "place", "person", "owner", "colour", "topic", "label", "subject",
    "recipient", "to", "folder", "file",
    "category", "item", "id", "start_date", "day", "language", "format", "target", "source", "destination",
    "first_name", "note", "room", "location",
)  # fmt: skip
_NUMBER_ARGUMENTS = (
    "count", "amount", "number", "people", "minutes", "hours", "price", "size", "page", "limit", "level", "quantity",
    "duration", "seats", "days", "volume",
)  # fmt: skip
_PERSONS = ("name", "person", "owner", "recipient", "first_name", "to")
_PLACES = ("city", "place", "location", "destination", "source")
_FLAG_ARGUMENTS = ("urgent", "private", "fast", "loud", "public", "repeat", "silent", "all_day")
NAME_PARTS = tuple(
    part
    for name in (*_VERBS, *_NOUNS, *_TEXT_ARGUMENTS, *_NUMBER_ARGUMENTS, *_FLAG_ARGUMENTS)
    for part in name.split("_")
)


def _property(kind: str, described: bool, about: str) -> Message:
    schema: Message = {"type": kind}
    if described:
        schema["description"] = about[0].upper() + about[1:]
    return schema


def _function(name: str, about: str, properties: Message, required: list[str], rng: random.Random) -> Message:
    parameters: Message = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        parameters["required"] = required
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    function: Message = {"name": name}
    if rng.random() < 0.6:
        function["description"] = about
    function["parameters"] = parameters
    if rng.random() < 0.05:
        function["strict"] = True
    return {"type": "function", "function": function}


_WEATHER_NAMES = ("get_weather", "get_weather", "get_current_weather")
_WEATHER_ABOUT = (
    "Get the weather in a city", "Get the current weather", "Get the current weather in a given location",
    "Weather of a place",
)  # fmt: skip


def weather_tool(rng: random.Random) -> tuple[Message, str, str, bool]:
    """The tool, its name, the name of its place argument, and whether it takes a unit."""
    name, place = rng.choice(_WEATHER_NAMES), rng.choice(("city", "city", "location"))
    about = rng.choice((f"the {place}", "the city and state, e.g. San Francisco, CA", "city name"))
    properties = {place: _property("string", rng.random() < 0.5, about)}
    has_unit = rng.random() < 0.35
    if has_unit:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    return _function(name, rng.choice(_WEATHER_ABOUT), properties, [place], rng), name, place, has_unit


def _one_argument_tool(
    rng: random.Random, names: tuple[str, ...], arguments: tuple[str, ...], abouts: tuple[str, ...], meaning: str
) -> tuple[Message, str, str]:
    name, argument = rng.choice(names), rng.choice(arguments)
    properties = {argument: _property("string", rng.random() < 0.4, meaning)}
    return _function(name, rng.choice(abouts), properties, [argument], rng), name, argument


def calculator_tool(rng: random.Random) -> tuple[Message, str, str]:
    names = ("calculator",)
    abouts = ("Compute an arithmetic expression", "A calculator", "Evaluate a sum", "Do arithmetic")
    return _one_argument_tool(rng, names, ("expression",), abouts, "the expression")


def search_tool(rng: random.Random) -> tuple[Message, str, str]:
    names = ("search",)
    abouts = ("Search the web", "Look something up", "Find pages about a topic")
    return _one_argument_tool(rng, names, ("query",), abouts, "what to search for")


def time_tool(rng: random.Random) -> tuple[Message, str, str]:
    names = ("get_time",)
    abouts = ("Get the time in a city", "Get the current time", "Time of day at a place")
    return _one_argument_tool(rng, names, ("city", "city", "location"), abouts, "the place")


def tool_name(rng: random.Random) -> str:
    verb = rng.choice(_VERBS) if rng.random() < 0.99 else words.made_up_word(rng)
    noun = rng.choice(_NOUNS) if rng.random() < 0.98 else words.made_up_word(rng)
    return f"{verb}_{noun}"


def _argument_names(rng: random.Random, pool: tuple[str, ...]) -> str:
    return rng.choice(pool) if rng.random() < 0.9 else words.a_word(rng)


def _argument(kind: str, rng: random.Random) -> tuple[str, Message, Any]:
    """Name, schema and value of one argument of a made-up tool."""
    if kind == "boolean":
        return rng.choice(_FLAG_ARGUMENTS), {"type": "boolean"}, rng.random() < 0.6
    if kind == "integer":
        value = rng.choice((rng.randint(0, 20), rng.randint(0, 999)))
        return _argument_names(rng, _NUMBER_ARGUMENTS), {"type": "integer"}, value
    name = _argument_names(rng, _TEXT_ARGUMENTS)
    if kind == "enum":
        options = [words.a_word(rng) for _ in range(3)]
        return name, {"type": "string", "enum": options}, rng.choice(options)
    if name in _PERSONS:
        return name, {"type": "string"}, words.a_name(rng)
    return name, {"type": "string"}, words.a_city(rng) if name in _PLACES else words.a_phrase(rng)


def made_up_tool(rng: random.Random, name: str) -> tuple[Message, dict[str, Any]]:
    """A tool with up to two arguments, and values for those that a user will name."""
    properties: Message = {}
    values: dict[str, Any] = {}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2))):
        kind = rng.choices(("string", "integer", "boolean", "enum"), (58, 27, 7, 8))[0]
        argument, schema, value = _argument(kind, rng)
        if argument not in properties:
            about = f"The {argument.replace('_', ' ')}"
            properties[argument] = {**schema, "description": about} if rng.random() < 0.2 else schema
            values[argument] = value
    required = list(values)
    if len(values) > 1 and rng.random() < 0.15:
        left_out = required.pop()
        if rng.random() < 0.6:
            del values[left_out]
    verb, _, noun = name.partition("_")
    about = rng.choice(("{v} a {n}", "{v} the {n}", "{v} {n}")).format(v=verb.capitalize(), n=noun.replace("_", " "))
    return _function(name, about, properties, required, rng), values


def distractors(rng: random.Random, taken: str) -> list[Message]:
    tools: list[Message] = []
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        made = rng.choice((calculator_tool, search_tool, time_tool, weather_tool))(rng)[0]
        if rng.random() < 0.5:
            made = made_up_tool(rng, tool_name(rng))[0]
        names = {taken, *(tool["function"]["name"] for tool in tools)}
        if not any(_alike(made["function"]["name"], name) for name in names):
            tools.append(made)
    return tools


def _alike(one: str, other: str) -> bool:
    """Two tools for the same purpose would make the right answer a matter of taste."""
    purposes = ("weather", "time", "search", "calc")
    return one == other or any(re.search(purpose, one) and re.search(purpose, other) for purpose in purposes)


def overlapping(tools: Sequence[Message], others: Sequence[Message]) -> bool:
    names, more = ([tool["function"]["name"] for tool in group] for group in (tools, others))
    return any(_alike(name, other) for name in names for other in more)
