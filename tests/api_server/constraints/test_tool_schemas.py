"""What calls are held to: strict tools as they say, others as far as that can be enforced."""

from __future__ import annotations

from typing import Any

import pytest

from api_server.constraints.compile_process import outcome
from api_server.constraints.compiler import refused
from api_server.constraints.tool_schemas import ANY_OBJECT, held_to
from api_server.errors import ErrorKind, RequestFailed
from interfaces import RequestID, TextGenerationRequest
from interfaces.request.constraint import Constraint
from tests.api_server.constraints.vocabulary import loaded

GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ODD = {**GOOD, "properties": {"a": {"type": "integer"}, "b": {"type": "string", "not": {"const": "x"}}}}
ODD_LOOSENED = {**GOOD, "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
LOOK_AHEAD = {"type": "object", "properties": {"b": {"type": "string", "pattern": "(?=a)b"}}}
CONTROL = {"type": "object", "properties": {"\x07": {"type": "string", "pattern": "(?=a)"}}}


async def compile_constraint(constraint: Constraint) -> str:
    found = outcome(*loaded(), constraint.kind, constraint.source)
    if "error" in found:
        raise refused(constraint, found["error"])
    return found["grammar"]


def asked(*schemas: Any, strict: Any = None, **more: Any) -> TextGenerationRequest:
    functions = [{"name": f"t{i}", "parameters": schema, "strict": strict} for i, schema in enumerate(schemas)]
    tools = [{"type": "function", "function": function} for function in functions]
    return TextGenerationRequest(RequestID("r"), prompt="x", tools=tools, **more)


@pytest.mark.parametrize("strict", [None, False])
async def test_a_loose_tool_is_followed_as_far_as_possible(strict: Any) -> None:
    request = asked(GOOD, ODD, LOOK_AHEAD, CONTROL, None, strict=strict, forced_tools=["t0", "t1", "t2", "t3", "t4"])
    assert await held_to(request, compile_constraint) == {
        "t0": GOOD,
        "t1": ODD_LOOSENED,
        "t2": {"type": "object", "properties": {"b": {"type": "string"}}, "required": []},
        "t3": ANY_OBJECT,
        "t4": {},
    }


async def test_a_strict_tool_is_refused_by_its_name_and_the_place() -> None:
    for more in ({}, {"forced_tools": ["t0", "t1"]}):
        with pytest.raises(RequestFailed, match=r"tools\[1\] \(t1\).*/properties/b has not") as failed:
            await held_to(asked(GOOD, ODD, strict=True, **more), compile_constraint)
        assert failed.value.kind is ErrorKind.INVALID


async def test_tools_that_no_grammar_is_about_are_not_looked_at() -> None:
    assert await held_to(asked(GOOD, ODD), compile_constraint) == {}


async def test_a_server_that_is_busy_says_so() -> None:
    async def busy(_: Constraint) -> str:
        raise RequestFailed(ErrorKind.OVERLOADED, "later")

    for strict in (True, False):
        with pytest.raises(RequestFailed, match="later"):
            await held_to(asked(GOOD, strict=strict, forced_tools=["t0"]), busy)


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, None),
        ({"parallel_tool_calls": False}, 1),
        ({"forced_tools": ["t0"]}, 1),
        ({"forced_tools": ["t0", "t1"]}, 2),
        ({"forced_tools": ["t0", "t1"], "parallel_tool_calls": False}, 1),
    ],
)
def test_forced_calls_have_an_end(more: Any, most: int | None) -> None:
    assert asked(GOOD, GOOD, **more).most_calls == most
