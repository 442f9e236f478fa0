"""The OpenAPI 3.1 document of this server, made from the pydantic models of its routes, and the page that shows it.

Reads the `endpoint.Document`s that dialects put beside their routes, and knows nothing of any dialect. Schemas of two
dialects may share a name: they are stored as `dialect.Model`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from api_server.web.endpoint import Document

_PAGE = Path(__file__).parent / "docs_page.html"

# Starlette's path templates have convertors; OpenAPI's have none.
_CONVERTOR = re.compile(r":\w+}")

# 529 is no standard status; Anthropic's clients know it.
_PHRASES = {status.value: status.phrase for status in HTTPStatus} | {529: "Overloaded"}

JSON = "application/json"
FORM = "multipart/form-data"

Model = type[BaseModel]


@dataclass(frozen=True)
class _Operation:
    """One method of one path in one dialect."""

    method: str
    path: str
    document: Document

    @property
    def dialect(self) -> str:
        return self.document.tag


@dataclass(frozen=True)
class _Schemas:
    """Component schemas of one dialect and the place of each model's."""

    components: dict[str, Any] = field(default_factory=dict)
    references: dict[tuple[Model, JsonSchemaMode], dict[str, Any]] = field(default_factory=dict)


def routes(
    described: Sequence[BaseRoute],
    version: str,
    pools: bool,
    hears: bool = False,
    speaks: bool = False,
    listens: bool = False,
) -> list[BaseRoute]:
    """GET /openapi.json (on TGI's servers also /api-doc/openapi.json) and GET /docs, for these routes.

    Routes that the served model cannot answer, because it pools, hears, speaks or generates, are left out.
    """

    @cache
    def encoded() -> bytes:
        found = document(described, version, pools, hears, speaks, listens)
        return json.dumps(found).encode()  # orjson refuses bounds above 64 bits

    async def openapi(_: Request) -> Response:
        return Response(encoded(), media_type=JSON)

    async def docs(_: Request) -> Response:
        return HTMLResponse(_PAGE.read_text())

    return [Route("/openapi.json", openapi), Route("/api-doc/openapi.json", openapi), Route("/docs", docs)]


def document(
    described: Iterable[BaseRoute],
    version: str,
    pools: bool = False,
    hears: bool = False,
    speaks: bool = False,
    listens: bool = False,
) -> dict[str, Any]:
    """The OpenAPI document of the routes that have a `Document` and that a model which `pools`, `hears` or generates
    answers; one that generates may have speech tokens, and `speaks` then, or ears, and `listens`.

    Several dialects on one path and method become one operation with a choice of bodies.
    """
    ordered = list(_operations(described, pools, hears, speaks, listens))
    schemas = {dialect: _schemas(dialect, ordered) for dialect in dict.fromkeys(o.dialect for o in ordered)}
    paths: dict[str, dict[str, Any]] = {}
    by_route = sorted(ordered, key=lambda o: (o.path, o.method))
    for (path, method), group in groupby(by_route, key=lambda o: (o.path, o.method)):
        paths.setdefault(path, {})[method.lower()] = _merged([_operation(o, schemas[o.dialect]) for o in group])
    license_of = {"name": "Apache 2.0", "identifier": "Apache-2.0"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokenyard", "version": version, "license": license_of},
        "tags": [{"name": dialect} for dialect in schemas],
        "paths": paths,
        "components": {"schemas": {name: s for part in schemas.values() for name, s in part.components.items()}},
    }


def _operations(
    described: Iterable[BaseRoute], pools: bool, hears: bool, speaks: bool, listens: bool
) -> Iterator[_Operation]:
    for route in described:
        first = getattr(getattr(route, "endpoint", None), "document", None)
        if not isinstance(route, Route) or not isinstance(first, Document):
            continue
        for method in sorted((route.methods or set()) - {"HEAD"}):
            for one in (first, *first.also):
                fits = (one.pools, one.hears) == (pools, hears)
                if one.computes and not (fits or (one.speaks and speaks) or (one.hears and listens)):
                    continue
                yield _Operation(method, _CONVERTOR.sub("}", route.path), one)


def _schemas(dialect: str, operations: Sequence[_Operation]) -> _Schemas:
    wanted: dict[tuple[Model, JsonSchemaMode], None] = {}
    for operation in operations:
        if operation.dialect == dialect:
            wanted |= dict.fromkeys(_models(operation.document))
    if not wanted:
        return _Schemas()
    references, definitions = models_json_schema(list(wanted), ref_template=f"#/components/schemas/{dialect}.{{model}}")
    components = {f"{dialect}.{name}": schema for name, schema in definitions.get("$defs", {}).items()}
    return _Schemas(components, {key: schema for key, schema in references.items() if key in wanted})


def _models(described: Document) -> Iterator[tuple[Model, JsonSchemaMode]]:
    for model in (described.body, described.json_body):
        if model:
            yield model, "validation"
    for model in (described.answer, described.frame, *described.errors.values()):
        if model:
            yield model, "serialization"


def _operation(operation: _Operation, schemas: _Schemas) -> dict[str, Any]:
    source = operation.document
    described: dict[str, Any] = {
        "tags": [source.tag],
        "operationId": _identifier(operation),
        "summary": source.summary,
        "description": source.description,
        "responses": _responses(source, schemas),
    }
    names = re.findall(r"{(\w+)}", operation.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if source.body:
        content: dict[str, Any] = {"schema": schemas.references[source.body, "validation"]}
        if source.example is not None:
            content["examples"] = {source.tag: {"value": source.example}}
        bodies = {FORM if source.is_form else JSON: content}
        if source.json_body:
            bodies[JSON] = {"schema": schemas.references[source.json_body, "validation"]}
        described["requestBody"] = {"required": True, "content": bodies}
    return described


def _responses(source: Document, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if source.answer:
        reference = schemas.references[source.answer, "serialization"]
        content[JSON] = {"schema": {"type": "array", "items": reference} if source.listed else reference}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in source.media_types}
    if source.frame:
        content[source.frame_type] = {"schema": schemas.references[source.frame, "serialization"]}
    answers: dict[str, Any] = {"200": {"description": "OK"} | ({"content": content} if content else {})}
    for status, model in source.errors.items():
        body = {JSON: {"schema": schemas.references[model, "serialization"]}}
        answers[str(status)] = {"description": _PHRASES[status], "content": body}
    return answers


def _identifier(operation: _Operation) -> str:
    words = operation.path.strip("/").replace("/", "_").replace("{", "").replace("}", "") or "root"
    return f"{operation.dialect}_{operation.method.lower()}_{words}"


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the operations that several dialects serve under the same path and method into one."""
    first = dict(parts[0])
    if len(parts) == 1:
        return first
    first["tags"] = [tag for part in parts for tag in part["tags"]]
    first["summary"] = " / ".join(dict.fromkeys(part["summary"] for part in parts))
    first["description"] = "\n\n".join(f"**{p['tags'][0]}**: {p['description']}" for p in parts if p["description"])
    bodies = [part["requestBody"]["content"][JSON] for part in parts if "requestBody" in part]
    if bodies:
        examples = {name: example for body in bodies for name, example in body.get("examples", {}).items()}
        content = {"schema": _any_of([body["schema"] for body in bodies])} | (
            {"examples": examples} if examples else {}
        )
        first["requestBody"] = {"required": True, "content": {JSON: content}}
    codes = dict.fromkeys(code for part in parts for code in part["responses"])
    first["responses"] = {c: _merged_response([p["responses"][c] for p in parts if c in p["responses"]]) for c in codes}
    return first


def _merged_response(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"description": " / ".join(dict.fromkeys(part["description"] for part in parts))}
    kinds = dict.fromkeys(kind for part in parts for kind in part.get("content", {}))
    if kinds:
        merged["content"] = {
            kind: {"schema": _any_of([p["content"][kind]["schema"] for p in parts if kind in p.get("content", {})])}
            for kind in kinds
        }
    return merged


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
