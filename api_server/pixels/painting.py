"""Images from the model: submitted, and handed out one after another.

Knows contexts, limits of the model, metrics and time; knows neither files of images nor dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from api_server.answers.observer import receiving
from api_server.answers.one_shot import OneShot, Pictures
from api_server.engine import scheduling
from api_server.engine.pooling import StreamedSubmission
from api_server.errors import ErrorKind, RequestFailed, invalid, shown
from api_server.pixels.reading import context_of
from api_server.pixels.wish import Wish
from api_server.pooling.report import Report
from api_server.state import ServerState
from api_server.text.pooled_model import IN_WORDS, ROUTES_OF_TASK
from api_server.web.endpoint import Call
from interfaces import PaintingContext, RequestID
from shared.pixel_files import PixelFiles


@dataclass
class Painting:
    """Images on their way. `images` gives each once; `close` must be called at the end, whatever it is."""

    context: PaintingContext
    # Tokens of the description.
    tokens: int
    _server: ServerState
    _report: Report
    _submission: StreamedSubmission

    async def images(self) -> AsyncIterator[NDArray[np.float32]]:
        """The pixels of each image, f32[height, width * 3] from 0 to 1. Raises RequestFailed, which the endpoint
        records."""
        try:
            async for values in self._submission.texts():
                yield values
        except RequestFailed as error:
            self._report.failed(error)
            raise
        self._report.finished()

    async def with_previews(self) -> AsyncIterator[tuple[int, NDArray[np.float32]]]:
        """The previews of the only image by number, from 1 on, and at last the image as number 0."""
        try:
            async for update in self._submission.with_previews():
                yield update
        except RequestFailed as error:
            self._report.failed(error)
            raise
        self._report.finished()

    def close(self) -> None:
        """Ends the request, and its work if it still runs. Idempotent."""
        self._server.engine.cancel([self._submission])
        self._report.left()


async def paint(call: Call, wish: Wish) -> Painting:
    """Submits a description. Raises RequestFailed for what the served model cannot paint."""
    server = call.server
    files = check(server)
    with receiving(server.observers, call.path):
        context = await _context(call, files, wish)
    tokens = int(context.lengths[0])
    pictures = Pictures(wish.count, context.pixels, context.steps_taken)
    tenant = call.caller.name
    shot = OneShot(call.path, call.received, wish.count, tokens, tenant, server.model_name, pictures=pictures)
    report = Report(server, shot)
    submission = server.engine.stream(context, scheduling.current.get())
    return Painting(context, tokens, server, report, submission)


async def _context(call: Call, files: PixelFiles, wish: Wish) -> PaintingContext:
    """The context of what a client wants, with the image that it begins with. Raises RequestFailed."""
    server = call.server
    wish = await _with_size(server, files, wish)
    read = await call.apart(lambda: context_of(files, server.tokenizer, wish))
    context = replace(read, request_id=RequestID(call.request_id), model_name=server.model_name)
    if wish.lora is not None:
        context = replace(context, lora=await _adapter(server, wish.lora), lora_scale=_scale(wish))
    if wish.picture is not None:
        async with scheduling.spending("reading its image"):
            original = await server.media.originals.read(
                wish.picture, wish.mask, context.width, context.height, (wish.picture_field, wish.mask_field)
            )
        context = replace(context, original=original.pixels, mask=original.mask)
    return context


async def _adapter(server: ServerState, name: str) -> str:
    """The digest of an adapter's content. Raises RequestFailed for a name that no adapter has."""
    names = server.settings.adapter_paths
    if name not in names:
        known = f"the server has: {', '.join(names)}" if names else "the server was started without any (--lora)"
        raise invalid(f"lora: there is no adapter {shown(name)}; {known}", "lora")
    return (await asyncio.to_thread(lambda: server.pixel_adapters))[name]


def _scale(wish: Wish) -> float:
    return 1.0 if wish.lora_scale is None else wish.lora_scale


async def _with_size(server: ServerState, files: PixelFiles, wish: Wish) -> Wish:
    """The wish with the size of the image that it begins with, if it names none. Raises RequestFailed."""
    if wish.picture is None or wish.size not in (None, "auto"):
        return wish
    if wish.width is not None or wish.height is not None:
        if wish.width is None or wish.height is None:
            missing = "width" if wish.width is None else "height"
            raise invalid(f"{missing}: the other side alone would stretch the image: send both, or neither", missing)
        return wish
    async with scheduling.spending("reading its image"):
        width, height = await server.media.originals.size(wish.picture, wish.picture_field)
    height, width = files.size_like(height, width)
    return replace(wish, width=width, height=height)


def check(server: ServerState) -> PixelFiles:
    """The facts of the served pipeline. Raises RequestFailed(WRONG_TASK) when it does not paint."""
    model = server.pooled_model
    if model is None or model.pixels is None:
        raise RequestFailed(
            ErrorKind.WRONG_TASK,
            f"this route needs a model that {IN_WORDS['paint']}, and {server.model_name!r} {IN_WORDS[server.task]} "
            f"(task {server.task}): serve a pipeline of diffusers, or ask {ROUTES_OF_TASK[server.task]}",
        )
    return model.pixels
