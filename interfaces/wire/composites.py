"""Forms of types that contain others: optional values, lists, maps, unions, and maps that name their class.

Knows forms (records.py); knows no declared types and no bytes.
"""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Collection
from typing import Any

import msgspec

from interfaces.wire.forms import Reader, WireError
from interfaces.wire.records import Form, built, wire_error, wire_tag, within

# Everything that msgpack can give but nil, and bytes, which msgspec takes for a kind of text.
_SOMETHING = bool | int | float | str | list[Any] | dict[Any, Any]


def reader(form: Form) -> Reader:
    """Make a reader of values of msgpack by a form. It raises WireError."""
    check, finish, _ = form

    def read(value: Any) -> Any:
        try:
            checked = msgspec.convert(value, check, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise wire_error(error, check) from None
        return checked if finish is None or checked is None else finish(checked)

    return read


def optional(form: Form) -> Form:
    return form._replace(check=form.check if form.check is Any else typing.Optional[form.check])  # noqa: UP045


def container(kind: Any, items: list[Form], same: bool) -> Form:
    """Return the form of a list, set, tuple or dict. `same`: a tuple has any number of items, all of one form."""
    if kind is dict:
        return _map(*(items or (Form(Any), Form(Any))))
    if kind is tuple and not same:
        return _tuple(items)
    check, finish, plain = items[0] if items else Form(Any)

    def finish_all(values: list[Any]) -> Any:
        if not values:
            return kind()
        finished = [within(f"[{i}]", finish, value) for i, value in enumerate(values)]
        return finished if kind is list else built(kind, finished)

    def write(values: Collection[Any]) -> Any:
        return [None if value is None else plain(value) for value in values] if values else values  # type: ignore[misc]

    writer = None if plain is None else write
    if finish is not None:
        return Form(list.__class_getitem__(check), finish_all, writer)
    return Form(kind[check, ...] if kind is tuple else kind[check], None, writer)


def _tuple(items: list[Form]) -> Form:
    """Return the form of a tuple with an item of each form. (No message has one, so it is written as it is.)"""

    def finish(values: tuple[Any, ...]) -> Any:
        pairs = enumerate(zip(items, values, strict=True))
        return tuple(within(f"[{i}]", form.finish, value) for i, (form, value) in pairs)

    return Form(tuple.__class_getitem__(tuple(form.check for form in items)), finish)


def _map(key: Form, item: Form) -> Form:
    def finish(values: dict[Any, Any]) -> Any:
        if not values:
            return values
        return {within(" key", key.finish, k): within(f"[{k!r}]", item.finish, v) for k, v in values.items()}

    def write(values: dict[Any, Any]) -> Any:
        if not values:
            return values
        return {k: None if value is None else item.plain(value) for k, value in values.items()}  # type: ignore[misc]

    check = dict.__class_getitem__((key.check, item.check))
    return Form(check, finish if key.finish or item.finish else None, write if item.plain else None)


def same(value: Any) -> Any:
    return value


def stateful(cls: Any, state: Form) -> Form:
    """Return the form of a class that travels as its `wire_type`: what `to_wire` gives, and `from_wire` takes."""
    finish = state.finish or same
    plain = state.plain or same
    return Form(state.check, lambda value: built(cls.from_wire, finish(value)), lambda value: plain(value.to_wire()))


def with_type(cls: type[Any], form: Form) -> Form:
    """Let a map name its class by `type`; it must be the class's name where the class is tagged."""
    read = reader(form)
    tagged = getattr(cls, "__tagged__", False)

    def finish(value: Any) -> Any:
        if type(value) is dict and "type" in value:
            if tagged and value["type"] != cls.__name__:
                raise WireError(f"expected a {cls.__name__}, got a {str(value['type'])[:80]!r}")
            value = {name: item for name, item in value.items() if name != "type"}
        return read(value)

    return Form(dict, finish)


def one_of(classes: list[type[Any]], forms: list[Form]) -> Form:
    """Return the form of one of several dataclasses: the first element of each one's list is its tag."""
    tags = {wire_tag(cls) for cls in classes}
    names = ", ".join(cls.__name__ for cls in classes)
    if len(tags) < len(classes) or None in tags:
        raise TypeError(f"{names} need a wire_tag each, all different: on the wire nothing else distinguishes them")
    finishers = {form.check: form.finish or same for form in forms}
    writers = {cls: form.plain or same for cls, form in zip(classes, forms, strict=True)}

    def plain(value: Any) -> Any:
        if type(value) not in writers:
            raise TypeError(f"{type(value).__name__} has no place on the wire where one of {names} is declared")
        return writers[type(value)](value)

    check = functools.reduce(operator.or_, (form.check for form in forms))
    return Form(check, lambda value: finishers[type(value)](value), plain)


def any_of(forms: list[Form], writable: bool) -> Form:
    """Return the form of one of several types: msgspec's union, or else the first that fits.

    `writable`: values can be written whichever of the types they have. TypeError where they cannot.
    """
    if len(forms) == 1:
        return forms[0]
    union: Any = functools.reduce(operator.or_, (form.check for form in forms))
    if not any(form.finish or form.plain for form in forms):
        try:
            msgspec.msgpack.Decoder(union)
        except TypeError:  # msgspec tells types apart by the kinds of their values only
            pass
        else:
            return Form(union)
    if any(form.check is bytes or (form.plain and not writable) for form in forms):
        raise TypeError("a union of bytes, arrays or dataclasses with other types has no place on the wire")
    readers = [reader(form) for form in forms]

    def finish(value: Any) -> Any:
        problems: list[str] = []
        for read in readers:
            try:
                return read(value)
            except WireError as error:
                problems.append(str(error))
        raise WireError(f"fits none of the declared types ({'; '.join(problems)})")

    return Form(_SOMETHING, finish)
