"""Bodies in JSON: a request's as a model, and a response's."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.responses import Response

from api_server.body.validation import Mismatch, parse
from api_server.errors import invalid
from api_server.web.endpoint import Call

M = TypeVar("M", bound=BaseModel)


def read_json(call: Call, model: type[M], optional: bool = False) -> M:
    """Reads the body, which may be left out if it is `optional`. Raises RequestFailed that names the wrong field."""
    try:
        return parse(model, {} if optional and not call.size else call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field) from None


def json_response(value: Any, status: int = 200) -> Response:
    """Makes a response of what orjson can write."""
    return Response(orjson.dumps(value), status, media_type="application/json")
