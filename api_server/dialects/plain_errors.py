"""Errors of dialects that have no rules of their own for them: HTTP's statuses, and `{"error": TEXT}`."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.responses import Response

from api_server.errors import ErrorKind, RequestFailed

_STATUS = {
    ErrorKind.BAD_JSON: 400,
    ErrorKind.BAD_MEDIA_TYPE: 415,
    ErrorKind.BODY_TOO_LARGE: 413,
    ErrorKind.INVALID: 400,
    ErrorKind.UNSUPPORTED: 400,
    ErrorKind.TOO_LONG: 400,
    ErrorKind.TEMPLATE: 400,
    ErrorKind.WRONG_TASK: 400,
    ErrorKind.MODEL_NOT_FOUND: 404,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.METHOD_NOT_ALLOWED: 405,
    ErrorKind.UNAUTHORIZED: 401,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.RATE_LIMITED: 429,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.GENERATION_FAILED: 500,
    ErrorKind.INTERNAL: 500,
}

# Those that the OpenAPI document names.
STATUSES = (400, 404, 413, 415, 429, 500, 503)


def error_body(error: RequestFailed, names: Mapping[str, str]) -> dict[str, str]:
    """The error object, with the dialect's names of fields."""
    return {"error": error.renamed(names).message}


def render(error: RequestFailed, names: Mapping[str, str], status: int | None = None) -> Response:
    """The response to an error known before the first byte; a status given here is the dialect's own."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
    body = orjson.dumps(error_body(error, names))
    return Response(body, status or _STATUS[error.kind], headers, "application/json")
