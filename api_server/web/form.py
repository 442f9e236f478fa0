"""Reads a body of multipart/form-data: short texts and few files, all in memory.

Knows Starlette's parser. The body is bounded already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from api_server.body.bodies import MAX_BODY_BYTES
from api_server.errors import ErrorKind, RequestFailed, invalid

# Bounds of one form.
_MOST_FIELDS = 100
_MOST_TEXT_BYTES = 1 << 20
_MULTIPART = "multipart/form-data"
# Bytes that are parsed at a time, between which other requests go on: a few milliseconds of the slowest content.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Form:
    """The fields of a form, each with all of its values; `name[]` is the same field as `name`."""

    texts: Mapping[str, list[str]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """The value of a field; None if it is absent. Raises RequestFailed if it is given twice."""
        values = self.texts.get(name, [])
        if len(values) > 1:
            raise invalid(f"{name} must be given once, got {len(values)} values", name)
        return values[0] if values else None

    @property
    def names(self) -> set[str]:
        """The names of all fields."""
        return {*self.texts, *self.files}

    def without(self, names: Collection[str]) -> Form:
        """The form without texts of these names."""
        return Form({name: values for name, values in self.texts.items() if name not in names}, self.files)


class _InMemory(MultiPartParser):
    """A parser that writes nothing to a disk."""

    spool_max_size = MAX_BODY_BYTES


async def read_form(headers: Headers, body: bytes | bytearray, most_files: int = 1) -> Form:
    """The fields of a body. Raises RequestFailed for one that is no form."""
    declared = headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != _MULTIPART:
        what = f"Unsupported Media Type: the content type must be {_MULTIPART}, got {declared[:100]!r}"
        raise RequestFailed(ErrorKind.BAD_MEDIA_TYPE, what)
    parser = _InMemory(
        headers, _pieces(body), max_files=most_files, max_fields=_MOST_FIELDS, max_part_size=_MOST_TEXT_BYTES
    )
    try:
        parsed = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"the request body is no form that can be read: {error.message}") from None
    texts: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}
    for name, value in parsed.multi_items():
        if isinstance(value, UploadFile):
            if (name := name.removesuffix("[]")) in files:
                raise invalid(f"{name} must be given once, as one file: leave the others out", name)
            files[name] = await value.read()
        else:
            texts.setdefault(name.removesuffix("[]"), []).append(value)
    await parsed.close()
    return Form(texts, files)


async def _pieces(body: bytes | bytearray) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), _PIECE):
        yield bytes(body[start : start + _PIECE])
        await asyncio.sleep(0)  # nothing else in the parser ever suspends
