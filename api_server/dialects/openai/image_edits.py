"""POST /v1/images/edits and /v1/images/variations: images that begin with one that the client sends, in a form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import orjson
from pydantic import Field
from pydantic.fields import FieldInfo
from starlette.responses import Response
from starlette.routing import Route

from api_server.body import unknown_fields
from api_server.body.validation import Mismatch, parse
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.images import (
    MOST_CHARACTERS,
    REFUSED,
    ImageBody,
    ImageEvent,
    ImageFields,
    ImagesAnswer,
    answered,
    check_body,
    wish_of,
)
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.errors import invalid
from api_server.pixels.painting import check
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.form import Form

# OpenAI's bound on images, and a mask. More than one image is refused by its name.
_MOST_FILES = 17
_STRENGTH: Any = Field(
    None, gt=0, le=1, description="How far the image may leave yours: the part of the steps that are taken"
)

F = TypeVar("F", bound=ImageFields)


class EditBody(ImageBody):
    strength: float | None = _STRENGTH
    input_fidelity: Literal["low"] | None = Field(None, description="Accepted, without effect: strength says it")


class VariationBody(ImageFields):
    prompt: str = Field("", max_length=MOST_CHARACTERS, description="What to paint; default: nothing is described")
    strength: float | None = _STRENGTH


class EditForm(EditBody):
    image: bytes = Field(description="The file of the image: PNG, JPEG, WebP, GIF, BMP or TIFF")
    mask: bytes | None = Field(
        None,
        description="The file of a mask of the same size: the image is painted anew where it is transparent or, "
        "without transparency, where it is white",
    )


class VariationForm(VariationBody):
    image: bytes = Field(description="The file of the image")


_ERRORS = dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer)
_EDIT = Document(
    "Paint an image anew, or a part of it",
    "openai",
    body=EditForm,
    answer=ImagesAnswer,
    frame=ImageEvent,
    errors=_ERRORS,
    pools=True,
    checks_task=True,
    files=_MOST_FILES,
)
_VARIATION = Document(
    "Paint variations of an image",
    "openai",
    body=VariationForm,
    answer=ImagesAnswer,
    errors=_ERRORS,
    pools=True,
    checks_task=True,
    files=_MOST_FILES,
)


def routes() -> list[Route]:
    return [
        endpoint("/v1/images/edits", edits, render_error, document=_EDIT),
        endpoint("/v1/images/variations", variations, render_error, document=_VARIATION),
    ]


async def edits(call: Call) -> Response:
    check(call.server)
    body = _read(call, EditBody)
    picture = _picture(call.fields, {"image", "mask"})
    mask = call.fields.files.get("mask")
    if mask == b"":
        raise invalid("mask has no bytes: send the bytes of an image file, or leave it out", "mask")
    wish = replace(wish_of(body, body.prompt), picture=picture, mask=mask, strength=body.strength)
    return await answered(call, body, wish, "image_edit")


async def variations(call: Call) -> Response:
    check(call.server)
    body = _read(call, VariationBody)
    if body.stream:
        raise invalid("stream is not possible for variations: leave it out, or ask /v1/images/edits", "stream")
    picture = _picture(call.fields, {"image"})
    wish = replace(wish_of(body, body.prompt), picture=picture, strength=body.strength)
    return await answered(call, body, wish, "image_edit")


def _picture(form: Form, known: set[str]) -> bytes:
    """The file of the image. Raises RequestFailed when it is missing, and for files that have no meaning."""
    for name in sorted(set(form.files) - known):
        raise invalid(
            f"{name:.60} is no file of this form: leave it out; its files are {', '.join(sorted(known))}", name[:60]
        )
    picture = form.files.get("image")
    if not picture:
        raise invalid("image must be given, as a file of the form: send the bytes of an image file", "image")
    return picture


def _read(call: Call, model: type[F]) -> F:
    """The texts of the form as a body. Raises RequestFailed."""
    fields = {name: _value(call.fields.text(name), model.model_fields.get(name)) for name in call.fields.texts}
    refused = {name: rule for name, rule in REFUSED.items() if name != "image"}
    unknown_fields.check(fields, model, refused)
    try:
        body = parse(model, fields)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field or None) from None
    check_body(call, body)
    return body


def _value(text: str | None, field: FieldInfo | None) -> object:
    """The value of a form's text: itself, or what JSON makes of it where the field is no text."""
    if text is None or field is None or str in (field.annotation, *get_args(field.annotation)):
        return text
    try:
        found = orjson.loads(text.strip())
    except orjson.JSONDecodeError:
        return text
    return found if isinstance(found, bool | int | float) else text
