"""Ollama's requests that change its store of models: refused, because an operator chooses the models at the start.

Clients pull a model before they use it, so the pull of a served one succeeds at once.
"""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.ollama import requests
from api_server.dialects.ollama.errors import NotManaged, render_error
from api_server.dialects.ollama.lines import MEDIA_TYPE, line
from api_server.dialects.ollama.schema import ErrorAnswer, Named, Progress
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.web.endpoint import BodyForm, Call, Document, Handler, endpoint

# The name of a model that is not served is no error of the body.
_PULLED = BodyForm(lambda _: None, any_media_type=True)
_REFUSED = dict.fromkeys((400, 404, 415, 501), ErrorAnswer)
# Paths and methods that are refused, each with its verb.
_PATHS = {
    "/api/push": ("POST", "push"),
    "/api/create": ("POST", "create"),
    "/api/copy": ("POST", "copy"),
    "/api/delete": ("DELETE", "delete"),
    "/api/blobs/{digest}": ("POST", "store"),
}


def routes() -> list[Route]:
    pulled = Document(
        "Nothing for a served model; refused for others",
        "ollama",
        body=Named,
        answer=Progress,
        errors=_REFUSED,
        description="A line of JSON unless `stream` is false.",
    )
    return [
        endpoint("/api/pull", pull, render_error, document=pulled, form=_PULLED),
        *(
            endpoint(
                path, _refusing(verb), render_error, (method,), Document(f"Refused: {verb}", "ollama", errors=_REFUSED)
            )
            for path, (method, verb) in _PATHS.items()
        ),
    ]


async def pull(call: Call) -> Response:
    """POST /api/pull: success for a name that is served."""
    name = requests.name_in(call.json)
    if not isinstance(name, str) or not name:
        raise invalid("model must be the name of a model, a text", "model")
    try:
        call.server.of_model(name, None)
    except RequestFailed as error:
        raise not_managed("pull", f"; {error.message}") from None
    done = {"status": "success"}
    if call.json.get("stream") is False:
        return Response(orjson.dumps(done), media_type="application/json")
    return Response(line(done), media_type=MEDIA_TYPE)


def not_managed(verb: str, more: str = "") -> NotManaged:
    """The error for a change of the store."""
    return NotManaged(
        ErrorKind.UNSUPPORTED,
        f"this server does not {verb} models: its operator chooses them at the start (MODEL and --also){more}",
    )


def _refusing(verb: str) -> Handler:
    async def refuse(call: Call) -> Response:
        raise not_managed(verb)

    return refuse
