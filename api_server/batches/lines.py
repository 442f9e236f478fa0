"""The lines of a batch: what comes in, checked once; and what goes out, appended and read again after a crash.

Knows the form of lines; knows neither routes nor models.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from api_server.body.depth import DEEPEST, too_deep
from api_server.errors import shown

MOST_LINES = 50_000
MOST_BYTES = 200_000_000
_LONGEST_ID = 512
# Errors of an input file that are shown.
_MOST_ERRORS = 100
# Beginnings of requests, in bytes, by which those that begin alike are put together. The shortest is kept as it is, the
# others as digests: a file of many long prompts takes little memory while it is read.
_BEGINNINGS = (64, 256, 512, 1024, 2048)
# Fields of bodies that make the prompt.
_PROMPTS = ("system", "tools", "messages", "prompt", "input")


@dataclass(frozen=True, slots=True)
class Line:
    """The place of a request in the input; small, for all those of a batch are in memory."""

    offset: int
    length: int


class WrongInput(ValueError):
    """An input file that cannot be run; `errors` name lines."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = errors


def read_input(path: Path, endpoint: str, done: Container[bytes] = frozenset()) -> list[Line]:
    """Checks an input file. Returns its requests but those that are done, those that begin alike together.

    `done` has marks of ids. Raises WrongInput.
    """
    errors: list[dict[str, Any]] = []
    seen: dict[bytes, int] = {}
    found: list[tuple[bytes, Line]] = []
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                problem, custom_id, prefix = _checked(raw, endpoint)
                mark = mark_of(custom_id)
                if not problem and mark in seen:
                    problem = f"custom_id {shown(custom_id)} is that of line {seen[mark]}, too"
                if not problem and len(seen) >= MOST_LINES:
                    problem = f"a batch may have {MOST_LINES} requests: send several"
                if problem:
                    errors.append({"code": "invalid_line", "line": number, "message": problem, "param": None})
                    if len(errors) >= _MOST_ERRORS:
                        break
                else:
                    seen[mark] = number
                    if mark not in done:
                        found.append((prefix, Line(offset, len(raw))))
            offset += len(raw)
    if not errors and not seen:
        errors = [{"code": "empty_file", "line": None, "message": "the input file has no requests", "param": None}]
    if errors:
        raise WrongInput(errors)
    return [line for _, line in sorted(found, key=lambda entry: entry[0])]


def _checked(raw: bytes, endpoint: str) -> tuple[str, str, bytes]:
    """What is wrong with a line, its id, and the beginning of its prompt."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return f"the line is not valid JSON: {error}", "", b""
    if not isinstance(value, dict):
        return "the line must be a JSON object with custom_id, method, url and body", "", b""
    custom_id = value.get("custom_id")
    body = value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _LONGEST_ID:
        return f"custom_id must be a text of 1 to {_LONGEST_ID} characters, got {shown(custom_id)}", "", b""
    if value.get("method", "POST") != "POST":
        return f"method must be POST, got {shown(value['method'])}", "", b""
    if value.get("url", endpoint) != endpoint:
        return f"url must be {endpoint}, the endpoint of the batch, got {shown(value['url'])}", "", b""
    if not isinstance(body, dict):
        return f"body must be an object, got {shown(body)}", "", b""
    if too_deep(body, raw):
        return f"body is nested deeper than {DEEPEST} levels", "", b""
    return "", custom_id, _beginning(orjson.dumps([body.get(name) for name in _PROMPTS]))


def _beginning(prompt: bytes) -> bytes:
    """A key that sorts prompts with a common beginning next to each other."""
    first, *further = _BEGINNINGS
    digests = (blake2b(prompt[:length], digest_size=8).digest() for length in further if len(prompt) >= length)
    return prompt[:first] + b"".join(digests)


def mark_of(custom_id: str) -> bytes:
    """A short mark of an id, by which ids are compared."""
    return blake2b(custom_id.encode(), digest_size=16).digest()


def body_of(path: Path, line: Line) -> dict[str, Any]:
    """The body of a request."""
    body: dict[str, Any] = _read(path, line)["body"]
    # A file has no place for a stream of events, and a batch has the lowest priority.
    for name in ("stream", "stream_options", "priority"):
        body.pop(name, None)
    return body


def id_of(path: Path, line: Line) -> str:
    """The id of a request."""
    return str(_read(path, line)["custom_id"])


def _read(path: Path, line: Line) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(line.offset)
        value: dict[str, Any] = orjson.loads(file.read(line.length))
        return value


def mend(path: Path) -> None:
    """Cuts off a last line that was not written whole: its process was killed."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        at = size
        while at:
            start = max(0, at - (1 << 16))
            file.seek(start)
            end = file.read(at - start).rfind(b"\n")
            if end >= 0:
                file.truncate(start + end + 1)
                return
            at = start
        file.truncate(0)


def append(path: Path, values: Iterable[Any]) -> None:
    """Adds lines and waits until they are on the disk. OSError where there is no room: then no line has been added."""
    data = b"".join(orjson.dumps(value) + b"\n" for value in values)
    if not data:
        return
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of an output; nothing where there is none."""
    if path.exists():
        with path.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n"):
                    yield orjson.loads(raw)
