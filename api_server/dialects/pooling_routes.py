"""The paths of one-shot requests that several dialects share, and the rules that find the dialect of a body.

`/rerank`: a body with `texts` is TEI's. One with `documents` is Cohere's and Jina's, except at /v1/rerank, where it is
SGLang's if it has no `model` or has `instruct`. `/classify`: `input` and `messages` are vLLM's, `text` and `input_ids`
are SGLang's. `/score`: `query`, `items` and `label_token_ids` are SGLang's, pairs of texts are vLLM's. Keys of two
dialects are an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.cohere import rerank as cohere
from api_server.dialects.openai import errors as openai_errors
from api_server.dialects.sglang import encode as sglang
from api_server.dialects.sglang import errors as sglang_errors
from api_server.dialects.sglang import score as sglang_score
from api_server.dialects.tei import errors as tei_errors
from api_server.dialects.tei import routes as tei
from api_server.dialects.tgi import errors as tgi_errors
from api_server.dialects.tgi import routes as tgi
from api_server.dialects.vllm import score as vllm_score
from api_server.dialects.vllm import texts as vllm
from api_server.errors import RequestFailed, invalid
from api_server.web.endpoint import Call, Document, ErrorRenderer, Handler, endpoint

_SGLANG_RERANK_PATH = "/v1/rerank"


@dataclass(frozen=True)
class Dialect:
    """One dialect of a path: the keys that only its bodies have, its handler and its errors."""

    keys: tuple[str, ...]
    handler: Handler
    render_error: ErrorRenderer

    def claims(self, body: Mapping[str, Any]) -> list[str]:
        return [key for key in self.keys if body.get(key) is not None]


_TEI_RERANK = Dialect(("texts",), tei.rerank, tei_errors.render_error)
_COHERE_RERANK = Dialect(("documents",), cohere.rerank, cohere.render_error)
_SGLANG_RERANK = Dialect(("documents",), sglang.rerank, sglang_errors.render_error)
_CLASSIFY = (
    Dialect(("input", "messages"), vllm.classify, openai_errors.render_error),
    Dialect(("text", "input_ids"), sglang.classify, sglang_errors.render_error),
)
_SCORE = (
    Dialect(("query", "items", "label_token_ids"), sglang_score.score, sglang_errors.render_error),
    Dialect(tuple(name for names in vllm_score.NAMES for name in names), vllm_score.score, openai_errors.render_error),
)

Choices = Callable[[Call], tuple[Dialect, ...]]


def routes() -> list[Route]:
    rerank = replace(cohere.RERANK, also=(tei.RERANK,))
    classify = replace(vllm.CLASSIFY, also=(sglang.CLASSIFY,))
    score = replace(sglang_score.SCORE, also=(vllm_score.SCORE,))
    return [
        _shared("/rerank", _rerankers, rerank, cohere.render_error),
        _shared("/v1/rerank", _rerankers, replace(rerank, also=(*rerank.also, sglang.RERANK)), cohere.render_error),
        _shared("/v2/rerank", _rerankers, rerank, cohere.render_error),
        _shared("/classify", lambda _: _CLASSIFY, classify, methods=("POST", "PUT")),
        _shared("/v1/classify", lambda _: _CLASSIFY, classify),
        _shared("/score", lambda _: _SCORE, score),
        _shared("/v1/score", lambda _: _SCORE, score),
        endpoint("/info", info, tgi_errors.render_error, ("GET",), replace(tgi.INFO, also=(tei.INFO,))),
        endpoint("/pooling", vllm.pooling, openai_errors.render_error, document=vllm.POOLING),
    ]


async def info(call: Call) -> Response:
    """GET /info, in TGI's form for a model that generates, else in TEI's."""
    return await (tgi.info if call.server.pooled_model is None else tei.info)(call)


def _rerankers(call: Call) -> tuple[Dialect, ...]:
    body = call.json
    is_sglangs = body.get("model") is None or body.get("instruct") is not None
    return _SGLANG_RERANK if call.path == _SGLANG_RERANK_PATH and is_sglangs else _COHERE_RERANK, _TEI_RERANK


def _shared(
    path: str,
    choices: Choices,
    document: Document,
    render_unread: ErrorRenderer = openai_errors.render_error,
    methods: tuple[str, ...] = ("POST",),
) -> Route:
    """A route whose body chooses the dialect; errors of a body without one have the form of the first dialect.

    `render_unread` renders the errors of a body that cannot be read.
    """

    async def handle(call: Call) -> Response:
        dialects = choices(call)
        claimed = [(dialect, keys) for dialect in dialects if (keys := dialect.claims(call.json))]
        if len(claimed) > 1:
            names = " and ".join(f"`{name}`" for _, keys in claimed for name in keys)
            raise invalid(f"{names} were given, which belong to different APIs; give the fields of one of them")
        if not claimed:
            wanted = ", or ".join("`" + "`, `".join(dialect.keys) + "`" for dialect in dialects)
            raise invalid(f"the body has none of the fields that this route needs: give {wanted}", dialects[0].keys[0])
        return await claimed[0][0].handler(call)

    def render_error(error: RequestFailed, call: Call) -> Response:
        try:
            dialects = choices(call)
            chosen = next((dialect for dialect in dialects if dialect.claims(call.json)), dialects[0])
        except RequestFailed:
            return render_unread(error, call)
        return chosen.render_error(error, call)

    return endpoint(path, handle, render_error, methods, document)
