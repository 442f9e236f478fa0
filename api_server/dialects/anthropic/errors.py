"""Anthropic's form of errors: `{"type": "error", "error": {"type", "message"}, "request_id"}` and their statuses."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from api_server.errors import ErrorKind, RequestFailed
from api_server.web.endpoint import Call
from api_server.web.sse import named_frame

_INVALID = "invalid_request_error"

_FORM = {
    ErrorKind.BAD_JSON: (400, _INVALID),
    ErrorKind.BAD_MEDIA_TYPE: (415, _INVALID),
    ErrorKind.BODY_TOO_LARGE: (413, "request_too_large"),
    ErrorKind.INVALID: (400, _INVALID),
    ErrorKind.UNSUPPORTED: (400, _INVALID),
    ErrorKind.TOO_LONG: (400, _INVALID),
    ErrorKind.TEMPLATE: (400, _INVALID),
    ErrorKind.WRONG_TASK: (400, _INVALID),
    ErrorKind.MODEL_NOT_FOUND: (404, "not_found_error"),
    ErrorKind.NOT_FOUND: (404, "not_found_error"),
    ErrorKind.METHOD_NOT_ALLOWED: (405, _INVALID),
    ErrorKind.UNAUTHORIZED: (401, "authentication_error"),
    ErrorKind.FORBIDDEN: (403, "permission_error"),
    ErrorKind.OVERLOADED: (429, "rate_limit_error"),
    ErrorKind.RATE_LIMITED: (429, "rate_limit_error"),
    ErrorKind.UNAVAILABLE: (529, "overloaded_error"),
    ErrorKind.TIMEOUT: (504, "timeout_error"),
    ErrorKind.GENERATION_FAILED: (500, "api_error"),
    ErrorKind.INTERNAL: (500, "api_error"),
}

STATUSES = (400, 404, 413, 415, 429, 500, 529)

_NAMES = {"max_new_tokens": "max_tokens"}


def error_body(error: RequestFailed, request_id: str) -> dict[str, Any]:
    detail = {"type": _FORM[error.kind][1], "message": _message(error)}
    return {"type": "error", "error": detail, "request_id": request_id}


def error_frame(error: RequestFailed, request_id: str) -> bytes:
    """The event that ends a stream whose headers are already sent."""
    return named_frame(error_body(error, request_id))


def render_error(error: RequestFailed, call: Call) -> Response:
    """The response to an error known before the first byte."""
    headers = {"request-id": call.request_id}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    body = orjson.dumps(error_body(error, call.request_id))
    return Response(body, _FORM[error.kind][0], headers, "application/json")


def _message(error: RequestFailed) -> str:
    """The error's message.

    Clients that shorten a conversation when it has grown too long look for Anthropic's own words.
    """
    prompt = error.numbers.get("prompt_tokens")
    limit = error.numbers.get("limit")
    if error.kind is ErrorKind.TOO_LONG and prompt is not None and limit is not None:
        return f"prompt is too long: {prompt} tokens > {limit - 1} maximum"
    return error.renamed(_NAMES).message
