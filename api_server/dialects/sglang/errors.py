"""The errors of SGLang's native dialect: status and `{"error": {"message", "type", "code"}}`.

Always an object: upstream sometimes answers a plain string under `error`, which breaks its own clients.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from api_server.errors import ErrorKind, RequestFailed
from api_server.web.endpoint import Call
from api_server.web.sse import DONE, frame

_STATUS_AND_TYPE = {
    ErrorKind.BAD_MEDIA_TYPE: (415, "invalid_request_error"),
    ErrorKind.BODY_TOO_LARGE: (413, "invalid_request_error"),
    ErrorKind.MODEL_NOT_FOUND: (404, "not_found_error"),
    ErrorKind.NOT_FOUND: (404, "not_found_error"),
    ErrorKind.METHOD_NOT_ALLOWED: (405, "invalid_request_error"),
    ErrorKind.UNAUTHORIZED: (401, "authentication_error"),
    ErrorKind.FORBIDDEN: (403, "permission_error"),
    ErrorKind.OVERLOADED: (503, "overloaded_error"),
    ErrorKind.RATE_LIMITED: (429, "rate_limit_error"),
    ErrorKind.UNAVAILABLE: (503, "unavailable_error"),
    ErrorKind.TIMEOUT: (504, "timeout_error"),
    ErrorKind.GENERATION_FAILED: (500, "generation_error"),
    ErrorKind.INTERNAL: (500, "internal_error"),
}
_BAD_REQUEST = (400, "invalid_request_error")

ERROR_STATUSES = (400, 413, 415, 500, 503)


def render_error(error: RequestFailed, call: Call) -> Response:
    """The answer to a request that failed before anything was sent."""
    body = error_body(error)
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
    return Response(orjson.dumps(body), body["error"]["code"], headers, "application/json")


def error_frame(error: RequestFailed) -> bytes:
    """The end of a failed stream: the error, then the end mark of every stream of this dialect."""
    return frame(error_body(error)) + DONE


def error_body(error: RequestFailed) -> dict[str, Any]:
    code, kind = _STATUS_AND_TYPE.get(error.kind, _BAD_REQUEST)
    return {"error": {"message": _text(error), "type": kind, "code": code}}


def _text(error: RequestFailed) -> str:
    if error.kind is ErrorKind.OVERLOADED:
        return f"The request queue is full. {error.message}"
    if error.kind is ErrorKind.TOO_LONG:
        return _length_text(error)
    return error.message


def _length_text(error: RequestFailed) -> str:
    numbers = error.numbers
    if "prompt_tokens" not in numbers or "limit" not in numbers:
        return error.message
    prompt = numbers["prompt_tokens"]
    limit = numbers["limit"]
    new = numbers.get("max_new_tokens")
    if new is None or prompt >= limit:
        return f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens)."
    return (
        f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of "
        f"{prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the completion."
    )
