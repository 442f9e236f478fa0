"""Ollama's form of errors: `{"error": TEXT}`, and its names of fields."""

from __future__ import annotations

from starlette.responses import Response

from api_server.dialects import plain_errors
from api_server.dialects.ollama.lines import line
from api_server.errors import RequestFailed
from api_server.web.endpoint import Call

# The client's names of fields whose internal names differ.
_NAMES = {
    "max_new_tokens": "options.num_predict",
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
    "min_p": "options.min_p",
    "typical_p": "options.typical_p",
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "stop": "options.stop",
}


class NotManaged(RequestFailed):
    """A request to change the models of this server, which its operator chooses at the start."""


def error_line(error: RequestFailed) -> bytes:
    """The line that ends a stream whose headers are already sent."""
    return line(plain_errors.error_body(error, _NAMES))


def render_error(error: RequestFailed, call: Call) -> Response:
    """The response to an error known before the first byte."""
    return plain_errors.render(error, _NAMES, 501 if isinstance(error, NotManaged) else None)
