"""The errors of TEI's dialect: status and `{error, error_type}`."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from api_server.errors import ErrorKind, RequestFailed
from api_server.web.endpoint import Call

_VALIDATION = "Validation"

_STATUS_AND_TYPE = {
    ErrorKind.BAD_JSON: (400, _VALIDATION),
    ErrorKind.BAD_MEDIA_TYPE: (415, _VALIDATION),
    ErrorKind.BODY_TOO_LARGE: (413, _VALIDATION),
    ErrorKind.WRONG_TASK: (400, _VALIDATION),
    ErrorKind.MODEL_NOT_FOUND: (404, _VALIDATION),
    ErrorKind.NOT_FOUND: (404, _VALIDATION),
    ErrorKind.METHOD_NOT_ALLOWED: (405, _VALIDATION),
    ErrorKind.UNAUTHORIZED: (401, "Unauthorized"),
    ErrorKind.FORBIDDEN: (403, "Forbidden"),
    ErrorKind.TEMPLATE: (422, "Tokenizer"),
    ErrorKind.OVERLOADED: (429, "Overloaded"),
    ErrorKind.RATE_LIMITED: (429, "Overloaded"),
    ErrorKind.UNAVAILABLE: (503, "Unhealthy"),
    ErrorKind.TIMEOUT: (504, "Backend"),
    ErrorKind.GENERATION_FAILED: (424, "Backend"),
    ErrorKind.INTERNAL: (500, "Backend"),
}

ERROR_STATUSES = (400, 413, 415, 422, 424, 429, 500, 503)


class EmptyInput(RequestFailed):
    """A request without a text."""

    def __init__(self, field: str) -> None:
        super().__init__(ErrorKind.INVALID, f"`{field}` cannot be empty", field=field)


def render_error(error: RequestFailed, call: Call) -> Response:
    status, kind = _STATUS_AND_TYPE.get(error.kind, (422, _VALIDATION))
    if isinstance(error, EmptyInput):
        status, kind = 400, "Empty"
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
    body = {"error": _text(error), "error_type": kind}
    return Response(orjson.dumps(body), status, headers, "application/json")


def _text(error: RequestFailed) -> str:
    if error.kind in (ErrorKind.INVALID, ErrorKind.UNSUPPORTED, ErrorKind.TOO_LONG):
        return f"Input validation error: {error.message}"
    if error.kind is ErrorKind.OVERLOADED:
        return "Model is overloaded"
    return error.message
