"""OpenAI's form of errors: `{"error": {"message", "type", "param", "code"}}` and the status of each kind."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from api_server.errors import ErrorKind, RequestFailed
from api_server.web.endpoint import Call
from api_server.web.sse import frame

_INVALID_REQUEST = "invalid_request_error"

_FORM: dict[ErrorKind, tuple[int, str, str | None]] = {
    ErrorKind.BAD_JSON: (400, _INVALID_REQUEST, "invalid_json"),
    ErrorKind.BAD_MEDIA_TYPE: (415, _INVALID_REQUEST, "unsupported_media_type"),
    ErrorKind.BODY_TOO_LARGE: (413, _INVALID_REQUEST, "body_too_large"),
    ErrorKind.INVALID: (400, _INVALID_REQUEST, "invalid_value"),
    ErrorKind.UNSUPPORTED: (400, _INVALID_REQUEST, "unsupported_parameter"),
    ErrorKind.TOO_LONG: (400, _INVALID_REQUEST, "context_length_exceeded"),
    ErrorKind.TEMPLATE: (400, _INVALID_REQUEST, "chat_template_error"),
    ErrorKind.WRONG_TASK: (400, _INVALID_REQUEST, "wrong_task"),
    ErrorKind.MODEL_NOT_FOUND: (404, _INVALID_REQUEST, "model_not_found"),
    ErrorKind.NOT_FOUND: (404, _INVALID_REQUEST, "not_found"),
    ErrorKind.METHOD_NOT_ALLOWED: (405, _INVALID_REQUEST, "method_not_allowed"),
    ErrorKind.UNAUTHORIZED: (401, _INVALID_REQUEST, "invalid_api_key"),
    ErrorKind.FORBIDDEN: (403, _INVALID_REQUEST, "forbidden"),
    ErrorKind.OVERLOADED: (429, "rate_limit_error", "overloaded"),
    ErrorKind.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.UNAVAILABLE: (503, "server_error", "unavailable"),
    ErrorKind.TIMEOUT: (504, "server_error", "timeout"),
    ErrorKind.GENERATION_FAILED: (500, "server_error", "generation_failed"),
    ErrorKind.INTERNAL: (500, "server_error", "internal_error"),
}

# This dialect's names of fields that the common path names otherwise.
_PARAM = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def error_body(error: RequestFailed) -> dict[str, Any]:
    """The error object of a body, or of a stream's last event."""
    _, kind, code = _FORM[error.kind]
    named = error.renamed(_PARAM)
    return {"error": {"message": named.message, "type": kind, "param": named.field, "code": code}}


def error_frame(error: RequestFailed) -> bytes:
    """The event that ends a stream whose headers are already sent."""
    return frame(error_body(error))


def render_error(error: RequestFailed, call: Call) -> Response:
    """The response to an error known before the first byte."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return Response(orjson.dumps(error_body(error)), _FORM[error.kind][0], headers, "application/json")
