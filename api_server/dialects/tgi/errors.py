"""The errors of the TGI dialect: status, `{error, error_type}`, and the words its clients match."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from api_server.dialects.tgi.validation import Limits, length_problem
from api_server.errors import ErrorKind, RequestFailed
from api_server.web.endpoint import Call
from api_server.web.sse import frame

_STATUS_AND_TYPE = {
    ErrorKind.BAD_JSON: (400, "validation"),
    ErrorKind.BAD_MEDIA_TYPE: (415, "validation"),
    ErrorKind.BODY_TOO_LARGE: (413, "validation"),
    ErrorKind.INVALID: (422, "validation"),
    ErrorKind.UNSUPPORTED: (422, "validation"),
    ErrorKind.TOO_LONG: (422, "validation"),
    ErrorKind.TEMPLATE: (422, "template_error"),
    ErrorKind.WRONG_TASK: (400, "wrong_task"),
    ErrorKind.MODEL_NOT_FOUND: (404, "not_found"),
    ErrorKind.NOT_FOUND: (404, "not_found"),
    ErrorKind.METHOD_NOT_ALLOWED: (405, "method_not_allowed"),
    ErrorKind.UNAUTHORIZED: (401, "unauthorized"),
    ErrorKind.FORBIDDEN: (403, "forbidden"),
    ErrorKind.OVERLOADED: (429, "overloaded"),
    ErrorKind.RATE_LIMITED: (429, "overloaded"),
    ErrorKind.UNAVAILABLE: (503, "unavailable"),
    ErrorKind.TIMEOUT: (504, "timeout"),
    ErrorKind.GENERATION_FAILED: (424, "generation"),
    ErrorKind.INTERNAL: (500, "internal"),
}

ERROR_STATUSES = (400, 413, 415, 422, 424, 429, 500, 503)


class BodyMismatch(RequestFailed):
    """A body whose JSON types are wrong; `message` is the whole text."""

    def __init__(self, problem: str, field: str) -> None:
        text = f"Failed to deserialize the JSON body into the target type: {problem}"
        super().__init__(ErrorKind.INVALID, text, field=field)


def render_error(error: RequestFailed, call: Call) -> Response:
    """The answer to a request that failed before anything was sent."""
    status, _ = _STATUS_AND_TYPE[error.kind]
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
    return Response(orjson.dumps(error_body(error)), status, headers, "application/json")


def error_frame(error: RequestFailed) -> bytes:
    """The event that ends a stream that failed."""
    return frame(error_body(error))


def error_body(error: RequestFailed) -> dict[str, str]:
    return {"error": _text(error), "error_type": _STATUS_AND_TYPE[error.kind][1]}


def _text(error: RequestFailed) -> str:
    match error.kind:
        case ErrorKind.TOO_LONG:
            return f"Input validation error: {_length_text(error)}"
        case ErrorKind.INVALID | ErrorKind.UNSUPPORTED if not isinstance(error, BodyMismatch):
            return f"Input validation error: {error.message}"
        case ErrorKind.BAD_JSON:
            return f"Failed to parse the request body as JSON: {error.message}"
        case ErrorKind.TEMPLATE:
            return f"Template error: {error.message}"
        case ErrorKind.OVERLOADED:
            return "Model is overloaded"
        case ErrorKind.GENERATION_FAILED:
            return f"Request failed during generation: {error.message}"
    return error.message


def _length_text(error: RequestFailed) -> str:
    numbers = error.numbers
    if "prompt_tokens" not in numbers or "limit" not in numbers:
        return error.message
    limits = Limits(numbers["limit"] - 1, numbers["limit"])
    return length_problem(numbers["prompt_tokens"], numbers.get("max_new_tokens"), limits) or error.message
