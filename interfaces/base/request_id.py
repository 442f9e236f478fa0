"""Names of requests, and the base of all requests.

A `RequestID` is a string: it compares, hashes, sorts and travels as one, and plain strings do wherever it is asked for.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Self, TypeVar


class RequestID(str):
    """An immutable name; without an argument a fresh one of 32 hexadecimal digits."""

    __slots__ = ()

    def __new__(cls, value: str | None = None) -> Self:
        return super().__new__(cls, uuid.uuid4().hex if value is None else value)

    @property
    def value(self) -> str:
        return str(self)

    def __str__(self) -> str:
        # An exact str, for code that looks at the type.
        return str.__str__(self)

    def __repr__(self) -> str:
        return f"RequestID({str.__repr__(self)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


# Names warm-up and padding rows; no client's request may have it.
DUMMY_REQUEST_ID = RequestID("cuda_graph_dummy")


class _HasRequestID(type):
    def __instancecheck__(cls, instance: object) -> bool:
        structural = cls.__module__ == __name__ and hasattr(instance, "request_id")
        return structural or super().__instancecheck__(instance)


@dataclass(frozen=True)
class Request(metaclass=_HasRequestID):
    """Base of requests. `isinstance` also accepts any object that has a `request_id`."""

    request_id: RequestID

    def __str__(self) -> str:
        return str(self.request_id)


RequestType = TypeVar("RequestType", bound=Request, contravariant=True)
