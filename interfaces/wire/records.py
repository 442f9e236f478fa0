"""Dataclasses on the wire: their fields, and the structs by which msgspec checks them.

In a message a dataclass is the list of its fields' values, after the class's `wire_tag` if it has one; elsewhere it is
a map by field name. Knows dataclasses; knows no bytes.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from interfaces.wire.forms import Reader, WireError

# Errors that a constructor may raise for values that have the right types.
BUILD_ERRORS = (ValueError, TypeError, AssertionError, OverflowError, RuntimeError)

_MISSING = re.compile(r"object missing required field (.*)")
_LONGEST_COMPLAINT = 300

_wire_fields: dict[type[Any], tuple[dataclasses.Field[Any], ...]] = {}


class Form(NamedTuple):
    """The form of a declared type on the wire.

    msgspec checks values against `check`. `finish` makes the declared value of a checked one and raises WireError, and
    `plain` makes the value that msgspec writes of a declared one and raises TypeError; None: it is the same value.
    Neither is called for nil, which stays nil where `check` allows it.
    """

    check: Any
    finish: Reader | None = None
    plain: Callable[[Any], Any] | None = None


def wire_fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields that travel, in wire order: those the constructor takes, unless marked `metadata={"wire":
    False}`."""
    found = _wire_fields.get(cls)
    if found is None:
        found = tuple(f for f in dataclasses.fields(cls) if f.init and f.metadata.get("wire", True))
        _wire_fields[cls] = found
    return found


def wire_tag(cls: type[Any]) -> str | None:
    """Return the tag before a class's fields in a message, which distinguishes it from others; None if it has none."""
    tag: str | None = getattr(cls, "wire_tag", None)
    return tag


def wire_error(error: msgspec.ValidationError, check: Any) -> WireError:
    """Make the WireError of what msgspec found in a value that it checked against `check`."""
    problem, found, path = str(error).rpartition(" - at `")
    problem = problem if found else path
    path = path if found else ""
    problem = (problem[:1].lower() + problem[1:]).replace("`", "")[:_LONGEST_COMPLAINT]
    try:
        path = _named_path(check, re.findall(r"\[(?:\d+|\.\.\.)\]|\.\w+", path))
    except (StopIteration, ValueError, IndexError):  # the peer's own text looked like a path
        path = ""
    if missing := _MISSING.fullmatch(problem):
        return WireError("missing", f"{path}.{missing[1]}")
    return WireError(problem, path)


def _named_path(check: Any, segments: Sequence[str]) -> str:
    """Write the path into a type of msgspec's with the names of fields, as far as the type alone determines them."""
    path = ""
    for i, segment in enumerate(segments):
        choices = [choice for choice in typing.get_args(check) if choice is not type(None)]
        if typing.get_origin(check) not in (list, set, frozenset, tuple, dict) and len(choices) == 1:
            check = choices[0]
        if isinstance(check, type) and issubclass(check, msgspec.Struct):
            fields = msgspec.structs.fields(check)
            place = int(segment[1:-1]) - (check.__struct_config__.tag is not None) if segment[0] == "[" else None
            if place == -1:
                return path
            field = fields[place] if place is not None else next(f for f in fields if f.name == segment[1:])
            path += f".{field.name}"
            check = field.type
        elif choices and typing.get_origin(check) in (list, set, frozenset, tuple, dict):
            path += segment
            check = choices[min(len(choices) - 1, int(segment[1:-1]) if typing.get_origin(check) is tuple else 1)]
        else:
            return path + "".join(segments[i:])
    return path


def built(cls: Callable[..., Any], *values: Any) -> Any:
    """Call a constructor with values of the right types. Raises WireError where it refuses them."""
    try:
        return cls(*values)
    except WireError:
        raise
    except BUILD_ERRORS as error:
        raise WireError(str(error)) from None


def positional(cls: type[Any], forms: Mapping[str, Form], head: tuple[int, int] | None = None) -> Form:
    """Return the form of a list of the fields' values. `head` are two numbers with which a message begins."""
    tag: Any = head[0] if head else wire_tag(cls)
    second = [("message", typing.Literal[head[1]])] if head else []
    checks = [(name, form.check) for name, form in forms.items()]
    struct = msgspec.defstruct(
        cls.__name__, [*second, *checks], array_like=True, forbid_unknown_fields=True, tag=tag, gc=False
    )
    names = list(forms)
    finishers = [(i, form.finish) for i, form in enumerate(forms.values()) if form.finish is not None]
    named_ones = any(field.kw_only for field in wire_fields(cls))
    as_tuple = msgspec.structs.astuple

    def finish(checked: Any) -> Any:
        values = [*as_tuple(checked)]
        if head:
            del values[0]
        place = None
        try:
            for place, finish_value in finishers:
                if (value := values[place]) is not None:
                    values[place] = finish_value(value)
            place = None
            return cls(**dict(zip(names, values, strict=True))) if named_ones else cls(*values)
        except WireError as error:
            raise error if place is None else error.within(f".{names[place]}") from None
        except BUILD_ERRORS as error:
            raise WireError(str(error), "" if place is None else f".{names[place]}") from None

    return Form(struct, finish, _plain(names, list(forms.values()), head or (() if tag is None else (tag,))))


def _plain(names: Sequence[str], forms: Sequence[Form], front: Sequence[Any]) -> Callable[[Any], Any]:
    """Make the function that lists an object's field values, after those of `front`."""
    writers = [(i, form.plain) for i, form in enumerate(forms, len(front)) if form.plain is not None]
    get = operator.attrgetter(*names)
    if len(names) == 1:
        return lambda value: [*front, writers[0][1](get(value)) if writers else get(value)]
    if not front and not writers:
        return get

    def plain(value: Any) -> Any:
        values = [*front, *get(value)]
        for place, write in writers:
            if (field := values[place]) is not None:
                values[place] = write(field)
        return values

    return plain


def named(cls: type[Any], forms: Mapping[str, Form], required: Sequence[str], make: Callable[..., Any]) -> Form:
    """Return the form of a map by field name, of which some must be there. `make` takes them by name."""
    checks = [
        (name, form.check) if name in required else (name, form.check, msgspec.UNSET) for name, form in forms.items()
    ]
    struct = msgspec.defstruct(cls.__name__, checks, forbid_unknown_fields=True, kw_only=True, gc=False)

    def finish(checked: Any) -> Any:
        values = msgspec.structs.asdict(checked)
        given = {name: value for name, value in values.items() if value is not msgspec.UNSET}
        for name, value in given.items():
            given[name] = within(f".{name}", forms[name].finish, value)
        try:
            return make(**given)
        except BUILD_ERRORS as error:
            raise error if isinstance(error, WireError) else WireError(str(error)) from None

    return Form(struct, finish)


def within(segment: str, finish: Reader | None, value: Any) -> Any:
    """Finish a checked value; `segment` is its place, for the error."""
    if finish is None or value is None:
        return value
    try:
        return finish(value)
    except WireError as error:
        raise error.within(segment) from None
    except BUILD_ERRORS as error:
        raise WireError(str(error), segment) from None
