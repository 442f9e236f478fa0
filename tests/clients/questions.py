"""What the embedded model was trained to answer, so that a choice of its own is the same each time at temperature 0."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tokenyard-demo"

WEATHER = "What is the weather in Paris?"
"""Calls get_weather with {"city": "Paris"} where that tool is offered."""
WEATHER_RESULT = '{"weather": "sunny"}'
WEATHER_ANSWER = "sunny"
"""In each answer that was made with the result; the words around it depend on how a client describes the tool."""

SUM = "What is 17 + 25?"
SUM_ANSWER = "17 + 25 = 42."

PERSON = "Describe a person as JSON with the fields name, age, city."

CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": CITY_SCHEMA,
}


class Closed(BaseModel):
    """Other properties would let an answer go on for ever."""

    model_config = ConfigDict(extra="forbid")


class Person(Closed):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    city: str = Field(max_length=20)


class Owner(Closed):
    kind: Literal["person", "company"]
    alive: bool


class Verdict(Closed):
    """Asked of a model that was never trained on it: only the schema brings it about.

    Nothing in it can be long, not even for clients that leave bounds out of the schema: the answer ends.
    """

    colour: Literal["red", "green"]
    owner: Owner
