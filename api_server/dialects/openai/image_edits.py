"""POST /v1/images/edits and /v1/images/variations: images that begin with one that the client sends.

It comes as a file of a form, and for edits also in JSON, as a data URI or a URL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import orjson
from pydantic import Field
from pydantic.fields import FieldInfo
from starlette.responses import Response
from starlette.routing import Route

from api_server.body import unknown_fields
from api_server.body.unknown_fields import ALWAYS, Refusals
from api_server.body.validation import Mismatch, parse
from api_server.chat.images import MOST_BYTES, MOST_BYTES_TOGETHER, Budget, bytes_of, url_source
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
from api_server.dialects.openai.schema import Body, ErrorAnswer
from api_server.errors import invalid
from api_server.pixels.painting import check
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.form import Form

# OpenAI's bound on images. More than one is refused by its name.
_MOST_PICTURES = 16
# These, and a mask.
_MOST_FILES = _MOST_PICTURES + 1
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


class ImageReference(Body):
    """An image of a body of JSON."""

    image_url: str = Field(description="A data URI, or a URL of a host in --fetch-hosts")


class EditJson(EditBody):
    images: list[ImageReference] = Field(
        min_length=1, max_length=_MOST_PICTURES, description="The image: no pipeline here takes more than one"
    )
    mask: ImageReference | None = Field(None, description="As in the form")


class VariationForm(VariationBody):
    image: bytes = Field(description="The file of the image")


_ERRORS = dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer)
_EDIT = Document(
    "Paint an image anew, or a part of it",
    "openai",
    body=EditForm,
    json_body=EditJson,
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
_REFUSED_IN_FORMS: Refusals = {name: rule for name, rule in REFUSED.items() if name != "image"}
_FILE_ID = ("the name of a file (send the image itself as image_url)", ALWAYS)
_REFUSED_IN_JSON: Refusals = {
    **_REFUSED_IN_FORMS,
    "image": ('this name (send images, a list with one {"image_url": ...})', ALWAYS),
    "images.file_id": _FILE_ID,
    "mask.file_id": _FILE_ID,
}


def routes() -> list[Route]:
    return [
        endpoint("/v1/images/edits", edits, render_error, document=_EDIT),
        endpoint("/v1/images/variations", variations, render_error, document=_VARIATION),
    ]


async def edits(call: Call) -> Response:
    check(call.server)
    if not call.is_form:
        return await _edits_of_json(call)
    body = _read(call, EditBody)
    picture = _picture(call.fields, {"image", "mask"})
    mask = call.fields.files.get("mask")
    if mask == b"":
        raise invalid("mask has no bytes: send the bytes of an image file, or leave it out", "mask")
    wish = replace(wish_of(body, body.prompt), picture=picture, mask=mask, strength=body.strength)
    return await answered(call, body, wish, "image_edit")


async def _edits_of_json(call: Call) -> Response:
    """POST /v1/images/edits with a body of JSON."""
    body = await call.apart(lambda: _checked(call, EditJson, call.json, _REFUSED_IN_JSON))
    if len(body.images) > 1:
        raise invalid(
            f"images has {len(body.images)} images, and the pipelines of this server take one: leave the others out",
            "images",
        )
    fields = ("images[0].image_url", "mask.image_url")
    given = [body.images[0], *([] if body.mask is None else [body.mask])]
    sources = [url_source(each.image_url, field) for each, field in zip(given, fields, strict=False)]
    files = await bytes_of(call.server, sources, Budget("image", MOST_BYTES, MOST_BYTES_TOGETHER, "images"))
    for file, field in zip(files, fields, strict=False):
        if not file:
            raise invalid(f"{field} has no bytes: send those of an image file", field)
    picture, mask = files[0], files[1] if len(files) > 1 else None
    wish = replace(wish_of(body, body.prompt), picture=picture, mask=mask, strength=body.strength)
    wish = replace(wish, picture_field=fields[0], mask_field=fields[1])
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
    return _checked(call, model, fields, _REFUSED_IN_FORMS)


def _checked(call: Call, model: type[F], fields: dict[str, Any], refused: Refusals) -> F:
    """The fields as a body. Raises RequestFailed."""
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
