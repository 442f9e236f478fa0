"""The protocol's form of errors: `{"error": TEXT}`, and its names of fields."""

from __future__ import annotations

from starlette.responses import Response

from api_server.dialects import plain_errors
from api_server.errors import RequestFailed
from api_server.web.endpoint import Call
from api_server.web.sse import frame

_NAMES = {"max_new_tokens": "max_tokens", "prompt": "text_input"}


def error_frame(error: RequestFailed) -> bytes:
    """The event that ends a stream whose headers are already sent."""
    return frame(plain_errors.error_body(error, _NAMES))


def render_error(error: RequestFailed, call: Call) -> Response:
    """The response to an error known before the first byte."""
    return plain_errors.render(error, _NAMES)
