"""`/v1/models`, which two dialects have: a client that sends `anthropic-version` gets Anthropic's form."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.anthropic import errors as anthropic_errors
from api_server.dialects.anthropic import models as anthropic_models
from api_server.dialects.anthropic import schema as anthropic_schema
from api_server.dialects.anthropic.routes import TAG as ANTHROPIC
from api_server.dialects.openai import errors as openai_errors
from api_server.dialects.openai import schema as openai_schema
from api_server.dialects.openai.routes import TAG as OPENAI
from api_server.dialects.openai.routes import list_models as openai_list
from api_server.dialects.openai.routes import show_model as openai_show
from api_server.errors import RequestFailed
from api_server.web.endpoint import Call, Document, endpoint


def routes() -> list[Route]:
    everything = "The served models"
    one = "One served model"
    page = Document(everything, ANTHROPIC, answer=anthropic_models.ModelPage)
    info = Document(one, ANTHROPIC, answer=anthropic_models.ModelInfo, errors={404: anthropic_schema.ErrorAnswer})
    listed = Document(everything, OPENAI, answer=openai_schema.ModelList, also=(page,))
    shown = Document(one, OPENAI, answer=openai_schema.Model, errors={404: openai_schema.ErrorAnswer}, also=(info,))
    return [
        endpoint("/v1/models", list_models, render_error, ("GET",), listed),
        endpoint("/v1/models/{model:path}", show_model, render_error, ("GET",), shown),
    ]


async def list_models(call: Call) -> Response:
    return await (anthropic_models.list_models if _is_anthropics(call) else openai_list)(call)


async def show_model(call: Call) -> Response:
    return await (anthropic_models.show_model if _is_anthropics(call) else openai_show)(call)


def render_error(error: RequestFailed, call: Call) -> Response:
    if _is_anthropics(call):
        return anthropic_errors.render_error(error, call)
    return openai_errors.render_error(error, call)


def _is_anthropics(call: Call) -> bool:
    """True for a client of Anthropic's API: every one sends this header, and no other client does."""
    return "anthropic-version" in call.headers
