"""Skill: calling tools and using their results.

Knows what users ask of a tool, the call that answers it and what to say of its result. Does not know how the template
prints tools and calls.
"""

import json
import random
import re
from typing import Any, NamedTuple

from demo_model import words
from demo_model.exchange import Check, Exchange, Message, assistant, equals, reword, user
from demo_model.skills import tool_definitions
from demo_model.skills.json_answers import dumped

CALL_SKILL = "tool call"
RESULT_SKILL = "tool result"

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.S)
_CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy")


class Task(NamedTuple):
    """What the user says, the tool for it, the calls to make, what the tool returns, and what to say then."""

    text: str
    tool: Message
    calls: list[Message]
    result: str
    answer: str


def parsed_calls(text: str) -> list[Any]:
    """The calls in a reply; a call that is no JSON counts as None."""
    calls: list[Any] = []
    for body in _CALL.findall(text):
        try:
            calls.append(json.loads(body))
        except ValueError:
            calls.append(None)
    return calls


def _calls_equal(calls: list[Message]) -> Check:
    return lambda text: parsed_calls(text) == calls and not _CALL.sub("", text).strip()


def _place(rng: random.Random) -> str:
    city = words.a_city(rng)
    return f"{city}, {rng.choice(tuple(words.COUNTRIES))}" if rng.random() < 0.12 else city


def _weather(rng: random.Random) -> Task:
    tool, name, argument, has_unit = tool_definitions.weather_tool(rng)
    places = [_place(rng)]
    if rng.random() < 0.1:
        places = [*dict.fromkeys((words.a_city(rng), words.a_city(rng)))]
    listed = words.joined(places)
    text = rng.choice((
        f"What is the weather in {listed}?", f"What's the weather in {listed}?", f"How is the weather in {listed}?",
        f"Weather in {listed}",
        f"What is the weather like in {listed}?", f"What's the weather like in {listed} today?",
        f"Tell me the weather in {listed}.",
        f"Is it raining in {listed}?", f"Is it warm in {listed} today?", f"Get the weather for {listed}.",
        f"How warm is it in {listed}?",
        f"Do I need an umbrella in {listed}?", f"What is the current weather in {listed}?",
        f"What is the temperature in {listed}?",
        f"Check the weather in {listed}.", f"How cold is it in {listed}?", f"Can you tell me the weather in {listed}?",
    ))  # fmt: skip
    extra: Message = {}
    if has_unit and rng.random() < 0.5:
        extra = {"unit": rng.choice(("celsius", "fahrenheit"))}
        text = text.rstrip(".?") + rng.choice((" in {u}?", " in {u}, please.", ", in {u}.")).format(u=extra["unit"])
    calls = [{"name": name, "arguments": {argument: place, **extra}} for place in places]
    degrees, condition, place = rng.randint(-9, 39), rng.choice(_CONDITIONS), places[0]
    result, answer = rng.choice((
        (dumped({"temperature": degrees, "condition": condition}),
        f"It is {degrees} degrees and {condition} in {place}."),
        (dumped({argument: place, "temperature": degrees, "condition": condition}),
        f"It is {degrees} degrees and {condition} in {place}."),
        (dumped({"temperature": degrees, "conditions": condition}),
        f"It is {degrees} degrees and {condition} in {place}."),
        (dumped({"temp": degrees}), f"It is {degrees} degrees in {place}."),
        (dumped({"temperature": degrees}), f"It is {degrees} degrees in {place}."),
        (dumped({"weather": condition}), f"It is {condition} in {place}."),
        (condition, f"It is {condition} in {place}."),
        (f"{degrees} degrees, {condition}", f"It is {degrees} degrees and {condition} in {place}."),
        (f"{degrees}°C and {condition}", f"It is {degrees}°C and {condition} in {place}."),
    ))  # fmt: skip
    return Task(reword(text, rng), tool, calls, result, answer)


def _calculation(rng: random.Random) -> Task:
    tool, name, argument = tool_definitions.calculator_tool(rng)
    sign = rng.choice("+-*/")
    a = rng.choice((rng.randint(0, 99), rng.randint(100, 9999)))
    b = rng.choice((rng.randint(1, 99), rng.randint(1, 999)))
    spoken = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
    expression = f"{a} {sign} {b}"
    text = rng.choice((
        f"What is {expression}?", f"Calculate {expression}.", f"{expression}", f"What is {a} {spoken} {b}?",
        f"How much is {a} {spoken} {b}?",
        f"Use the calculator for {expression}.", f"Compute {expression}.", f"What's {expression}?",
        f"What is {a}{sign}{b}?",
    ))  # fmt: skip
    outcome = str({"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 2)}[sign])
    result = rng.choice((outcome, f'{{"result": {outcome}}}', f'{{"value": {outcome}}}'))
    calls = [{"name": name, "arguments": {argument: expression}}]
    return Task(reword(text, rng), tool, calls, result, f"{expression} = {outcome}.")


def _search(rng: random.Random) -> Task:
    tool, name, argument = tool_definitions.search_tool(rng)
    topic = rng.choice((words.a_phrase(rng), words.a_phrase(rng), words.a_city(rng), words.a_name(rng)))
    text = rng.choice((
        f"Search for {topic}.", f"Search the web for {topic}.", f"Look up {topic}.", f"Find pages about {topic}.",
        f"Please search for {topic}.",
        f"Can you look up {topic}?", f"What can you find about {topic}?", f"Search {topic}",
        f"Find something about {topic}.",
    ))  # fmt: skip
    found = f"{topic} is {rng.choice(('a', 'the', 'one'))} {words.a_word(rng)} {words.a_word(rng)}"
    result = rng.choice((found, dumped({"results": [found]}), dumped({"text": found}), dumped([found])))
    calls = [{"name": name, "arguments": {argument: topic}}]
    return Task(reword(text, rng), tool, calls, result, f"I found this: {found}.")


def _time(rng: random.Random) -> Task:
    tool, name, argument = tool_definitions.time_tool(rng)
    place = words.a_city(rng)
    text = rng.choice((
        f"What time is it in {place}?", f"What is the time in {place}?", f"Tell me the time in {place}.",
        f"Time in {place}", f"How late is it in {place}?",
        f"What's the time in {place}?", f"Get the time in {place}.", f"What is the current time in {place}?",
        f"What time is it now in {place}?",
    ))  # fmt: skip
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    result = rng.choice((clock, dumped({"time": clock}), dumped({argument: place, "time": clock})))
    calls = [{"name": name, "arguments": {argument: place}}]
    return Task(reword(text, rng), tool, calls, result, f"It is {clock} in {place}.")


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


_NATURAL = (
    "{s} with {x}.", "{s}: {x}.", "{s}, {x}.", "I want to {s} with {x}.", "Can you {s} with {x}?", "{s} with {x}",
    "I need to {s}: {x}.",
)  # fmt: skip
_NATURAL_ALONE = ("{s}.", "Please {s}.", "I want to {s}.", "Can you {s}?", "{s} now.")
_EXPLICIT = ("Call {n} with {x}.", "Use {n} with {x}.", "Run {n} with {x}.", "Please call {n}: {x}.", "{n} with {x}.")
_EXPLICIT_ALONE = ("Call {n}.", "Use {n}.", "Run {n}.", "Please use {n} now.")


def _spoken_arguments(values: dict[str, Any], rng: random.Random) -> str:
    """The arguments as a person would say them: with or without underscores, quotes and equals signs."""
    if rng.random() < 0.15:
        return words.joined(
            [
                f'{name} "{value}"' if isinstance(value, str) else f"{name} {_shown(value)}"
                for name, value in values.items()
            ]
        )
    pairs: list[str] = []
    for name, value in values.items():
        said = name if rng.random() < 0.5 else name.replace("_", " ")
        pairs.append(f"{said}{rng.choice((' ', ' ', ' is ', ' = ', ': '))}{_shown(value)}")
    return rng.choice((", ".join(pairs), words.joined(pairs)))


def _made_up(rng: random.Random) -> Task:
    name = tool_definitions.tool_name(rng)
    tool, values = tool_definitions.made_up_tool(rng, name)
    listed = _spoken_arguments(values, rng) if values else ""
    natural, explicit = (_NATURAL, _EXPLICIT) if values else (_NATURAL_ALONE, _EXPLICIT_ALONE)
    template = rng.choice(natural if rng.random() < 0.6 else explicit)
    text = template.format(s=name.replace("_", " "), n=name, x=listed)
    text = text[0].upper() + text[1:] if rng.random() < 0.5 and not text.startswith(name) else text
    result, answer = _made_up_result(rng)
    return Task(text, tool, [{"name": name, "arguments": values}], result, answer)


def _made_up_result(rng: random.Random) -> tuple[str, str]:
    kind = rng.randrange(5)
    if kind == 0:
        text = words.a_phrase(rng)
        return text, f"The tool says: {text}"
    if kind == 1:
        number = str(rng.randint(0, 9999))
        return number, f"The tool says: {number}"
    if kind == 2:
        text = words.a_phrase(rng)
        return dumped({"error": text}), f"The tool failed: {text}"
    if kind == 3:
        return rng.choice(('{"status": "ok"}', '{"ok": true}', "ok", "done", '{"success": true}')), "Done."
    value: dict[str, Any] = {}
    while len(value) < rng.choice((1, 2, 2)):
        value[words.a_word(rng)] = rng.choice((words.a_word(rng), rng.randint(0, 999)))
    return dumped(value), "Result: " + ", ".join(f"{key} is {item}" for key, item in value.items()) + "."


_KINDS = (_weather, _calculation, _search, _time, _made_up)


def draw(rng: random.Random) -> Exchange:
    """The user asks, the model calls."""
    return draw_pair(rng)[0]


def draw_result(rng: random.Random) -> Exchange:
    """The tool has answered, the model says so."""
    return draw_pair(rng)[1]


def draw_pair(rng: random.Random) -> tuple[Exchange, Exchange]:
    """The same question up to the call, and up to the answer that uses the tool's result."""
    task = rng.choices(_KINDS, (20, 10, 10, 10, 50))[0](rng)
    tools = (task.tool, *tool_definitions.distractors(rng, task.tool["function"]["name"]))
    called = assistant("", _call_thought(task.calls[0]), task.calls)
    asked = Exchange(CALL_SKILL, _key(task.calls), (user(task.text), called), _calls_equal(task.calls), tools)
    results, final = [task.result], task.answer
    if len(task.calls) > 1:
        one, other = rng.choice(_CONDITIONS), rng.choice(_CONDITIONS)
        results = [dumped({"weather": one}), dumped({"weather": other})]
        places = [next(iter(call["arguments"].values())) for call in task.calls]
        final = f"It is {one} in {places[0]} and {other} in {places[1]}."
    returned = ({"role": "tool", "content": result} for result in results)
    reply = assistant(final, "The tool has answered, so I tell the result.")
    return asked, Exchange(RESULT_SKILL, asked.key, (*asked.messages, *returned, reply), equals(final), tools)


def _key(calls: list[Message]) -> str:
    """Made-up tools are held out by name; the usual ones by the arguments, or they would never be learned."""
    name = str(calls[0]["name"])
    usual = re.search("weather|time|search", name)
    return name if "_" in name and not usual else dumped(calls)


def _call_thought(call: Message) -> str:
    return f"The tool {call['name']} can do this."


def draw_tools(rng: random.Random) -> tuple[Message, ...]:
    """Tools for a conversation that does not need them."""
    return tuple(tool_definitions.distractors(rng, "") or [tool_definitions.weather_tool(rng)[0]])
