"""The served model in the form of Anthropic's clients: a page of one, by its name."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from pydantic import BaseModel
from starlette.datastructures import QueryParams
from starlette.responses import Response

from api_server.state import ServerState
from api_server.web.endpoint import Call


class ModelInfo(BaseModel):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None = None
    max_tokens: int | None = None


class ModelPage(BaseModel):
    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


async def list_models(call: Call) -> Response:
    """Lists the models, or those after or before one of them."""
    found = [_model(state, name) for state in call.server.models for name in (state.model_name, *state.adapters)]
    names = [model["id"] for model in found]
    query = QueryParams(call.scope["query_string"])
    after = query.get("after_id", "")
    before = query.get("before_id", "")
    found = found[names.index(after) + 1 if after in names else 0 : names.index(before) if before in names else None]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return _json({"data": found, "has_more": False, "first_id": first, "last_id": last}, call)


async def show_model(call: Call) -> Response:
    asked = call.path_params["model"]
    return _json(_model(call.server, call.server.check_model(asked) or call.server.model_name), call)


def _model(server: ServerState, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(server.created, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    # The length of the context is unknown until the first worker is there.
    length = server.max_model_len
    lengths = {} if length is None else {"max_input_tokens": length, "max_tokens": length}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        **lengths,
    }


def _json(value: dict[str, Any], call: Call) -> Response:
    return Response(orjson.dumps(value), headers={"request-id": call.request_id}, media_type="application/json")
