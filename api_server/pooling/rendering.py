"""Values as JSON: numbers straight from the arrays, or base64 of little-endian float32.

Large answers are written in a thread and in pieces, between which other requests run. Knows no dialect's fields.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.responses import Response

from api_server.web.endpoint import Call

# Numbers that are written on the event loop: about a millisecond.
_FEW_NUMBERS = 1 << 14

Array = NDArray[np.float32]


def base64_of(values: Array) -> str:
    """Little-endian float32 as base64; a matrix row after row."""
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def json_of(value: Any) -> bytes:
    """JSON of a value that may have arrays in it."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


async def answer(
    call: Call, items: Iterable[Any], numbers: int, name: str = "", fields: Mapping[str, Any] | None = None
) -> Response:
    """The response with a JSON list of items: bare, or under `name` beside other `fields`.

    `numbers` says how many numbers the items have together.
    """
    head = json_of(fields or {})[:-1]
    separator = b"," if fields else b""
    before, after = (head + separator + json_of(name) + b":", b"}") if name else (b"", b"")

    def write() -> bytes:
        return b"".join((before, b"[", b",".join(_pieces(iter(items), numbers)), b"]", after))

    body = write() if numbers <= _FEW_NUMBERS else await call.server.bodies.apart(write)
    return Response(body, media_type="application/json")


def _pieces(items: Iterator[Any], numbers: int) -> Iterator[bytes]:
    at_a_time = 64 if numbers > _FEW_NUMBERS else 1 << 20
    while chunk := list(islice(items, at_a_time)):
        yield json_of(chunk)[1:-1]


def encoder(encoding_format: str) -> Callable[[Array], Any]:
    """Makes what stands for a vector in an answer."""
    return base64_of if encoding_format == "base64" else np.ascontiguousarray
