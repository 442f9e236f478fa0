"""The schemas that the calls of a request are held to, tool by tool.

A strict tool's schema is enforced exactly, or the request is refused. Another tool's schema is enforced as far as
possible. Knows tools and the compiler's verdicts; knows no format of calls.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from api_server.constraints.schema_terms import loosened, shallow
from api_server.errors import ErrorKind, RequestFailed, invalid
from interfaces import Constraint, ConstraintKind, TextGenerationRequest

Compile = Callable[[Constraint], Awaitable[str]]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


async def held_to(request: TextGenerationRequest, compile_constraint: Compile) -> dict[str, Any]:
    """Schemas of the tools in this request's grammar, by name.

    Raises RequestFailed, with the tool's name, for a strict one that cannot be enforced.
    """
    any_call = request.forced_tools is not None or request.constraint is not None
    found: dict[str, Any] = {}
    for i, tool in enumerate(request.tools or ()):
        function = tool["function"]
        strict = function.get("strict") is True
        if strict or any_call:
            schema = function.get("parameters") or {}
            wanted = _strict if strict else _loose
            found[function["name"]] = await wanted(schema, f"tools[{i}] ({function['name']})", compile_constraint)
    return found


async def _strict(schema: Any, tool: str, compile_constraint: Compile) -> Any:
    try:
        await compile_constraint(_constraint(schema, tool))
    except RequestFailed as failed:
        if failed.kind is not ErrorKind.INVALID:
            raise
        raise invalid(f"{failed.message}; without strict they are followed as far as possible", "tools") from None
    return schema


async def _loose(schema: Any, tool: str, compile_constraint: Compile) -> Any:
    for less in (schema, loosened(schema), shallow(schema)):
        try:
            await compile_constraint(_constraint(less, tool))
        except RequestFailed as failed:
            if failed.kind is not ErrorKind.INVALID:
                raise
        else:
            return less
    return ANY_OBJECT


def _constraint(schema: Any, tool: str) -> Constraint:
    text = json.dumps({**ANY_OBJECT, **schema}, ensure_ascii=False)
    return Constraint(ConstraintKind.JSON_SCHEMA, text, field=f"the parameters of {tool}")
