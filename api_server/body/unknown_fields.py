"""Checks the fields of a body at every depth: known, refused for their value, or reported.

A field that this server does not have is refused by its path if its value asks for something, and ignored otherwise.
An unknown name is ignored, as by the servers whose clients send it, and logged once. Knows no dialect: each has its
own table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from api_server.errors import unsupported

log = logging.getLogger("tokenyard")

# Returns True when a value asks for what is refused.
Asks = Callable[[Any], bool]

# Paths of fields (`reasoning.mode`; lists have no index), each with its subject and a test for refused values.
Refusals = Mapping[str, tuple[str, Asks]]

_MAX_REPORTED = 100
_reported: set[str] = set()


def unless(*harmless: Any) -> Asks:
    """Makes an `Asks` that is true for every value but these. Where False asks for nothing, 0 may ask."""

    def asks(value: Any) -> bool:
        return not any(value is ok or (not isinstance(ok, bool) and value == ok) for ok in harmless)

    return asks


ALWAYS: Asks = unless(None)


def check(raw: Mapping[str, Any], model: type[BaseModel], refused: Refusals, known: Collection[str] = ()) -> None:
    """Raises RequestFailed(UNSUPPORTED) for the first value in a body that asks for a refused feature.

    `model` has the fields at every depth; `known` are paths of further ones.
    """
    _check(raw, model, refused, known, "", "")


def report_unknown(paths: Iterable[str]) -> None:
    """Reports fields that are ignored, as every dialect's reference ignores them."""
    for path in paths:
        report(path, "the field %.100r of a request is unknown and ignored", path)


def report(name: str, message: str, *args: object) -> None:
    """Logs a warning for the operator, once for each name, and for a bounded number of names."""
    if name not in _reported and len(_reported) < _MAX_REPORTED:
        _reported.add(name)
        log.warning(f"{message} (reported once)", *args)


def _check(
    raw: Mapping[str, Any],
    model: type[BaseModel],
    refused: Refusals,
    known: Collection[str],
    where: str,
    path: str,
) -> None:
    for name, value in raw.items():
        full = where + name
        rule = path + name
        if rule in refused:
            what, asks = refused[rule]
            if asks(value):
                raise unsupported(full, what)
        elif name not in model.model_fields:
            if rule not in known and model.model_config.get("extra") == "ignore":
                report_unknown([rule])
        else:
            for index, inner, form in _objects(value, model, name):
                _check(inner, form, refused, known, f"{full}{index}.", f"{rule}.")


def _objects(value: Any, model: type[BaseModel], name: str) -> Iterator[tuple[str, Mapping[str, Any], type[BaseModel]]]:
    """Yields the objects in a field, or in its list, with their index as text."""
    form = _form(model, name)
    if form is None:
        return
    if isinstance(value, Mapping):
        yield "", value, form
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, Mapping):
                yield f"[{i}]", item, form


@cache
def _form(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The one model among the types of a field, if there is one."""
    found = set(_models(model.model_fields[name].annotation))
    return found.pop() if len(found) == 1 else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
