"""The paths that TGI and SGLang share, and the rule that finds the dialect of a body.

A body with `inputs` is TGI's; one with `text`, `input_ids` or `input_embeds` is SGLang's; both is an error, never a
guess. The chosen dialect is kept for everything: defaults, validation, errors and frames.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.sglang import errors as sglang_errors
from api_server.dialects.sglang import generate as sglang
from api_server.dialects.sglang import tokenize as sglang_tokenize
from api_server.dialects.sglang.batch import NO_INPUT
from api_server.dialects.tei import errors as tei_errors
from api_server.dialects.tei import routes as tei
from api_server.dialects.tgi import errors as tgi_errors
from api_server.dialects.tgi import routes as tgi
from api_server.errors import RequestFailed, invalid
from api_server.web.endpoint import Call, ErrorRenderer, endpoint

Dialect = Literal["tgi", "sglang", "both", "neither"]

_SGLANG_INPUTS = ("text", "input_ids", "input_embeds")
_SGLANG_TOKENIZE_INPUTS = ("prompt", "messages")


def routes() -> list[Route]:
    """The shared routes.

    For an unknown dialect `POST /generate` answers with SGLang's errors, the others with TGI's.
    """
    return [
        endpoint(
            "/generate",
            generate,
            _errors_of(_SGLANG_INPUTS, sglang_errors.render_error),
            methods=("POST", "PUT"),
            document=replace(sglang.GENERATE, also=(tgi.GENERATE,)),
        ),
        endpoint(
            "/generate_stream",
            generate_stream,
            _errors_of(_SGLANG_INPUTS, tgi_errors.render_error),
            document=replace(tgi.GENERATE_STREAM, also=(replace(sglang.GENERATE, answer=None),)),
        ),
        endpoint(
            "/",
            compat_generate,
            _errors_at_root,
            document=replace(tgi.COMPAT, also=(sglang.GENERATE, tei.EMBED)),
        ),
        endpoint(
            "/tokenize",
            tokenize,
            _errors_of(_SGLANG_TOKENIZE_INPUTS, tgi_errors.render_error),
            document=replace(tgi.TOKENIZE, also=(sglang_tokenize.TOKENIZE,)),
        ),
    ]


def _errors_at_root(error: RequestFailed, call: Call) -> Response:
    if call.server.pooled_model is not None:
        return tei_errors.render_error(error, call)
    return _errors_of(_SGLANG_INPUTS, tgi_errors.render_error)(error, call)


async def generate(call: Call) -> Response:
    """POST|PUT /generate."""
    return await _dispatch(call, tgi.generate_once, sglang.generate_native)


async def generate_stream(call: Call) -> Response:
    """POST /generate_stream; SGLang has no such path, so its bodies mean `stream: true` here."""

    async def native_stream(call: Call) -> Response:
        return await sglang.generate_native(call, stream=True)

    return await _dispatch(call, tgi.generate_stream, native_stream)


async def compat_generate(call: Call) -> Response:
    """POST /; of a model that pools, as TEI."""
    if call.server.pooled_model is not None:
        return await tei.at_root(call)
    return await _dispatch(call, tgi.compat_generate, sglang.generate_native)


async def tokenize(call: Call) -> Response:
    """POST /tokenize."""
    found = dialect_of(call.json, _SGLANG_TOKENIZE_INPUTS)
    if found == "both":
        raise invalid("`inputs` and `prompt` or `messages` were both given; give one of them")
    return await (sglang_tokenize.tokenize(call) if found == "sglang" else tgi.tokenize(call))


def dialect_of(body: Mapping[str, Any], sglang_inputs: tuple[str, ...] = _SGLANG_INPUTS) -> Dialect:
    """The dialect of a body, by its keys. A null under one of SGLang's names counts as absent."""
    is_sglang = any(body.get(name) is not None for name in sglang_inputs)
    if "inputs" in body:
        return "both" if is_sglang else "tgi"
    return "sglang" if is_sglang else "neither"


async def _dispatch(
    call: Call, for_tgi: Callable[[Call], Awaitable[Response]], for_sglang: Callable[[Call], Awaitable[Response]]
) -> Response:
    match dialect_of(call.json):
        case "tgi":
            return await for_tgi(call)
        case "sglang":
            return await for_sglang(call)
        case "both":
            names = " and ".join(f"`{name}`" for name in _SGLANG_INPUTS if call.json.get(name) is not None)
            raise invalid(f"`inputs` (TGI) and {names} (SGLang) were both given; give one of them")
        case "neither":
            if "parameters" in call.json:
                raise tgi_errors.BodyMismatch("missing field `inputs`", "inputs")
            raise invalid(NO_INPUT)


def _errors_of(sglang_inputs: tuple[str, ...], when_unknown: ErrorRenderer) -> ErrorRenderer:
    """Renders an error in the dialect of the body that caused it."""

    def render(error: RequestFailed, call: Call) -> Response:
        try:
            body = call.json
        except RequestFailed:
            return when_unknown(error, call)
        match dialect_of(body, sglang_inputs):
            case "sglang":
                return sglang_errors.render_error(error, call)
            case "neither" if "parameters" not in body:
                return when_unknown(error, call)
        return tgi_errors.render_error(error, call)

    return render
