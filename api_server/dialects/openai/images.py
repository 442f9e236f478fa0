"""POST /v1/images/generations: OpenAI's fields, and those of diffusers that other servers take."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.body import unknown_fields
from api_server.body.unknown_fields import ALWAYS, Refusals, unless
from api_server.body.validation import Mismatch, parse
from api_server.dialects.openai.errors import error_frame, render_error
from api_server.dialects.openai.first_event import begun
from api_server.dialects.openai.schema import LONGEST_NAME, Body, ErrorAnswer
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.pixels.encoding import Format, encoded
from api_server.pixels.painting import Painting, paint
from api_server.pixels.reading import MOST_SEED
from api_server.pixels.store import ImageStore
from api_server.pixels.wish import Wish
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.sse import EventStream, named_frame
from shared.pixel_files import MOST_SIDE, MOST_STEPS

# Characters of a description, as OpenAI has it.
MOST_CHARACTERS = 32_000
MOST_IMAGES = 10
MOST_GUIDANCE = 50.0
MOST_PREVIEWS = 3
MOST_SCALE = 4.0


class ImageFields(Body):
    """What all routes for images take."""

    model: str | None = Field(None, description="The served model's name, or nothing")
    n: int | None = Field(None, ge=1, le=MOST_IMAGES, description="Number of images")
    size: str | None = Field(None, max_length=LONGEST_NAME, description="auto, or width and height, as in 512x768")
    output_format: Format | None = Field(None, description="The files' format; default: png")
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of jpeg and webp; default: 100, the best"
    )
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="b64_json (default): the file in base64; url: its address, for an hour"
    )
    quality: Literal["auto", "standard", "medium"] | None = Field(
        None, description="Accepted, without effect: num_inference_steps says how much is computed"
    )
    background: Literal["auto", "opaque"] | None = Field(None, description="Images are opaque")
    moderation: Literal["auto", "low"] | None = Field(None, description="Accepted, without effect")
    stream: bool | None = Field(None, description="Send events: previews, and at last the image")
    partial_images: int | None = Field(None, ge=0, le=MOST_PREVIEWS, description="Previews in a stream")
    user: str | None = Field(None, max_length=LONGEST_NAME, description="Accepted, without effect")
    negative_prompt: str | None = Field(None, max_length=MOST_CHARACTERS, description="What not to paint")
    seed: int | None = Field(
        None, ge=0, le=MOST_SEED, description="Seed of the first image's noise; the next image has the next one"
    )
    num_inference_steps: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Denoising steps; default: the pipeline's"
    )
    guidance_scale: float | None = Field(
        None, ge=0, le=MOST_GUIDANCE, description="How closely the description is followed; default: the pipeline's"
    )
    lora: str | None = Field(None, max_length=LONGEST_NAME, description="The name of an adapter of the server")
    lora_scale: float | None = Field(
        None, ge=-MOST_SCALE, le=MOST_SCALE, description="The adapter's strength; default: 1"
    )
    step_cache: float | None = Field(
        None, ge=0, le=1, description="Steps reuse the prediction before up to this change: faster, and not exact"
    )
    width: int | None = Field(None, ge=1, le=MOST_SIDE, description="Instead of size")
    height: int | None = Field(None, ge=1, le=MOST_SIDE, description="Instead of size")


class ImageBody(ImageFields):
    prompt: str = Field(min_length=1, max_length=MOST_CHARACTERS, description="What to paint")


class ImageData(BaseModel):
    """One image: the file in base64, or its address."""

    b64_json: str | None = None
    url: str | None = None
    # The seed that paints this image again, alone.
    seed: int


class ImageTokenDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class ImageUsage(BaseModel):
    """Tokens of the description, and patches of 16 by 16 pixels of the images that were sent and painted."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageTokenDetails


class ImagesAnswer(BaseModel):
    created: int
    data: list[ImageData]
    output_format: Format
    background: Literal["opaque"]
    size: str
    usage: ImageUsage


class ImageEvent(BaseModel):
    """One event: a preview has `partial_image_index`, and the last event has the image, `seed` and `usage`."""

    type: Literal[
        "image_generation.partial_image",
        "image_generation.completed",
        "image_edit.partial_image",
        "image_edit.completed",
    ]
    b64_json: str
    created_at: int
    output_format: Format
    background: Literal["opaque"]
    size: str
    partial_image_index: int | None = None
    seed: int | None = None
    usage: ImageUsage | None = None


# Fields of other servers, and of OpenAI's other models, that this one does not implement.
REFUSED: Refusals = {
    "style": ("a style", unless(None, "natural", "vivid")),
    "true_cfg_scale": ("a second guidance", unless(None, 1, 1.0)),
    "image": ("an image to begin with on this route: send a form to /v1/images/edits, which", ALWAYS),
}

_DOCUMENT = Document(
    "Paint images",
    "openai",
    body=ImageBody,
    answer=ImagesAnswer,
    frame=ImageEvent,
    example={"prompt": "A red train in the rain", "size": "auto", "num_inference_steps": 20, "seed": 7},
    errors=dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer),
    pools=True,
    checks_task=True,
)


_CONTENT = Document("The file of an image that was asked for as a URL", "openai", errors={404: ErrorAnswer})


def routes() -> list[Route]:
    return [
        endpoint("/v1/images/generations", generations, render_error, document=_DOCUMENT),
        endpoint("/v1/images/{image_id}/content", content, render_error, ("GET",), _CONTENT),
    ]


async def generations(call: Call) -> Response:
    body = await call.apart(lambda: _read(call))
    return await answered(call, body, wish_of(body, body.prompt), "image_generation")


def wish_of(body: ImageFields, prompt: str) -> Wish:
    """What a body asks for."""
    return Wish(
        prompt=prompt,
        negative_prompt=body.negative_prompt,
        count=body.n or 1,
        size=body.size,
        width=body.width,
        height=body.height,
        steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        seed=body.seed,
        previews=(body.partial_images or 0) if body.stream else 0,
        lora=body.lora,
        step_cache=body.step_cache or 0.0,
        lora_scale=body.lora_scale,
    )


async def answered(call: Call, body: ImageFields, wish: Wish, event: str) -> Response:
    """Paints images, and answers with them or with a stream of events, whose types begin with `event`."""
    store = _store(call) if body.response_format == "url" else None
    kind = body.output_format or "png"
    quality = 100 if body.output_compression is None else body.output_compression
    painting = await paint(call, wish)
    if body.stream:
        events = await begun(_events(painting, kind, quality, event), painting.close)
        return EventStream(events, painting.close, error_frame)
    try:
        files = [await asyncio.to_thread(partial(encoded, image, kind, quality)) async for image in painting.images()]
    finally:
        painting.close()
    urls = None if store is None else [_url(call, name) for name in await asyncio.to_thread(_kept, store, files, kind)]
    # Ten large images are more than a hundred megabytes of text.
    answer = await asyncio.to_thread(_answer, painting, files, urls, kind)
    return Response(answer, media_type="application/json")


async def content(call: Call) -> Response:
    """GET /v1/images/{image_id}/content."""
    store = None if call.server.painted_images is None else ImageStore(call.server.painted_images)
    found = None if store is None else await asyncio.to_thread(store.find, call.path_params["image_id"])
    if found is None:
        raise RequestFailed(
            ErrorKind.NOT_FOUND,
            "there is no such image, or not any more: images are kept for an hour, and the oldest go first when they "
            "are many",
        )
    file, kind = found
    return Response(file, media_type=f"image/{kind}", headers={"cache-control": "private, max-age=3600"})


def _store(call: Call) -> ImageStore:
    """Where images are kept that have a URL. Raises RequestFailed."""
    if call.server.painted_images is None:
        raise invalid("response_format: this server keeps no images, so ask for b64_json", "response_format")
    return ImageStore(call.server.painted_images)


def _kept(store: ImageStore, files: list[bytes], kind: Format) -> list[str]:
    """Keeps images. Returns their names. Raises RequestFailed when there is no room."""
    try:
        return [store.put(file, kind) for file in files]
    except OSError as error:
        raise RequestFailed(
            ErrorKind.UNAVAILABLE,
            f"response_format: this server cannot keep images now ({error.strerror}): ask for b64_json",
            field="response_format",
        ) from error


def _url(call: Call, name: str) -> str:
    settings = call.server.settings
    host = call.headers.get("host") or f"{settings.host}:{settings.port}"
    return f"{call.scope['scheme']}://{host}/v1/images/{name}/content"


def _read(call: Call) -> ImageBody:
    unknown_fields.check(call.json, ImageBody, REFUSED)
    try:
        body = parse(ImageBody, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field or None) from None
    check_body(call, body)
    return body


def check_body(call: Call, body: ImageFields) -> None:
    """Raises RequestFailed for another model, and for fields that contradict each other."""
    call.server.check_model(body.model or "")
    if body.stream and (body.n or 1) > 1:
        raise invalid(f"n must be 1 for a stream, got {body.n}: send a request for each image", "n")
    if body.stream and body.response_format == "url":
        raise invalid("response_format must be b64_json for a stream: leave it out", "response_format")
    if body.lora_scale is not None and body.lora is None:
        raise invalid("lora_scale is the strength of an adapter: name it by lora, or leave it out", "lora_scale")
    if body.partial_images and not body.stream:
        raise invalid("partial_images are parts of a stream: set stream to true, or leave them out", "partial_images")


async def _events(painting: Painting, kind: Format, quality: int, event: str) -> AsyncIterator[bytes]:
    async for number, pixels in painting.with_previews():
        name = f"{event}.{'partial_image' if number else 'completed'}"
        yield await asyncio.to_thread(_event, painting, name, number, pixels, kind, quality)


def _event(
    painting: Painting, name: str, number: int, pixels: NDArray[np.float32], kind: Format, quality: int
) -> bytes:
    """The event of a preview, or of the image, which is number 0."""
    event = {
        "type": name,
        "b64_json": base64.b64encode(encoded(pixels, kind, quality)).decode(),
        "created_at": int(time.time()),
        **facts_of(painting, kind),
    }
    if number:
        return named_frame({**event, "partial_image_index": number - 1})
    return named_frame({**event, "seed": int(painting.context.seeds[0]), "usage": usage_of(painting)})


def _answer(painting: Painting, files: list[bytes], urls: list[str] | None, kind: Format) -> bytes:
    """The answer as JSON, with the images' addresses, or else with the files."""
    seeds = painting.context.seeds.tolist()
    if urls is None:
        texts = [base64.b64encode(file).decode() for file in files]
        data = [{"b64_json": text, "seed": seed} for text, seed in zip(texts, seeds, strict=True)]
    else:
        data = [{"url": url, "seed": seed} for url, seed in zip(urls, seeds, strict=True)]
    answer = {"created": int(time.time()), "data": data, **facts_of(painting, kind), "usage": usage_of(painting)}
    return orjson.dumps(answer)


def facts_of(painting: Painting, kind: Format) -> dict[str, Any]:
    """What answers and events say about all their images."""
    context = painting.context
    return {"output_format": kind, "background": "opaque", "size": f"{context.width}x{context.height}"}


def usage_of(painting: Painting) -> dict[str, Any]:
    context = painting.context
    patches = context.patches * len(context)
    given = 0 if context.original is None else context.patches
    return {
        "input_tokens": painting.tokens + given,
        "output_tokens": patches,
        "total_tokens": painting.tokens + given + patches,
        "input_tokens_details": {"text_tokens": painting.tokens, "image_tokens": given},
    }
