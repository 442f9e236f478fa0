"""SGLang's sessions: POST /open_session and /close_session, and requests that go on from earlier ones.

The scheduler keeps the tokens of each turn; here they become the beginning of the next prompt.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.responses import Response
from starlette.routing import Route

from api_server.answers.choice import Choice
from api_server.chat.media_parts import LoadedImage, LoadedVideo, arguments
from api_server.dialects.sglang.batch import Batch, Item
from api_server.dialects.sglang.errors import render_error
from api_server.dialects.sglang.schema import ErrorResponse, GenerateRequest
from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import read_json
from interfaces import (
    SESSION_MEDIA_BYTES,
    ImageWishes,
    RequestID,
    SessionAction,
    SessionAnswer,
    SessionMedium,
    TextGenerationRequest,
    VideoWishes,
)

LONGEST_SECONDS = 86400.0
# The client's name of images and videos that come from its session.
_FIELD = "session_params"


class OpenSession(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    capacity_of_str_len: int = Field(description="Without effect: what a session keeps is bounded by the server")
    session_id: str | None = Field(None, min_length=1, max_length=256, description="Default: a new one")
    timeout: float | None = Field(
        None, gt=0, le=LONGEST_SECONDS, description="Seconds without use after which it is closed; default an hour"
    )
    streaming: bool | None = Field(None, description="Not built yet")


class SessionId(RootModel[str]):
    """The session's name."""


class CloseSession(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    session_id: str = Field(max_length=256)


def routes() -> list[Route]:
    errors = dict.fromkeys((400, 503), ErrorResponse)
    start = Document(
        "Open a session, in which requests go on from earlier ones",
        "sglang",
        body=OpenSession,
        answer=SessionId,
        errors=errors,
        example={"capacity_of_str_len": 1000},
        description="Answers with its id, as JSON. `session_params` of /generate name it.",
    )
    end = Document("Close a session", "sglang", body=CloseSession, errors=errors)
    return [
        endpoint("/open_session", open_session, render_error, ("GET", "POST"), start),
        endpoint("/close_session", close_session, render_error, ("GET", "POST"), end),
    ]


async def open_session(call: Call) -> Response:
    body = read_json(call, OpenSession)
    if body.streaming:
        raise RequestFailed(ErrorKind.UNSUPPORTED, "streaming sessions are not supported", field="streaming")
    name = body.session_id or uuid.uuid4().hex
    await _send(call, SessionAction.OPEN, name, timeout=body.timeout or 0.0)
    return Response(orjson.dumps(name), media_type="application/json")


async def close_session(call: Call) -> Response:
    await _send(call, SessionAction.CLOSE, read_json(call, CloseSession).session_id)
    return Response(status_code=200)


async def resumed(call: Call, body: GenerateRequest, batch: Batch) -> Batch:
    """Puts the session's tokens before the prompt; returns the same batch when there is no session."""
    params = body.session_params
    if params is None:
        return batch
    item = batch.items[0]
    if len(batch.items) != 1 or item.n != 1 or isinstance(item.prompt, np.ndarray):
        raise invalid("session_params needs one prompt of text or input_ids, and n = 1", "session_params")
    if item.sounds:
        raise invalid("audio_data and session_params exclude each other: a session keeps no sounds", "audio_data")
    answer = await _send(call, SessionAction.RECALL, params.id, request=params.rid or "", replace=bool(params.replace))
    known = answer.tokens[: answer.prompt_len] if params.drop_previous_output else answer.tokens
    if params.offset:
        known = known[: params.offset]
    added = await _ids(call, item, None if params.rid is None else False)
    images, videos = await _media(call, known, answer.media)
    seen = replace(
        item,
        prompt=[*known.tolist(), *added],
        images=[*images, *item.images],
        videos=[*videos, *item.videos],
        session_turn=answer.turn,
    )
    _check_size(_kept(seen))
    return replace(batch, items=[seen])


async def remember(call: Call, body: GenerateRequest, item: Item, choice: Choice) -> None:
    """Keeps a complete answer for the session of its request; a closed session keeps nothing."""
    params = body.session_params
    if params is None or choice.finish is None or choice.finish.kind == "cancelled":
        return
    tokens = np.array([*choice.prompt_token_ids.tolist(), *choice.token_ids], np.int32)
    fields: Mapping[str, Any] = {
        "tokens": tokens,
        "prompt_len": choice.prompt_tokens,
        "parent": params.rid or "",
        "parent_turn": item.session_turn,
    }
    media = _kept(item)
    # The session has the media of the turn before: sending them again would hold up the scheduler.
    new = [
        replace(medium, files=[]) if is_known else medium for medium, is_known in zip(media, _known(item), strict=True)
    ]
    answer = await _ask(call, SessionAction.REMEMBER, params.id, request=item.rid, media=new, **fields)
    if answer.refused and new != media:
        await _ask(call, SessionAction.REMEMBER, params.id, request=item.rid, media=media, **fields)


async def _ids(call: Call, item: Item, add_special_tokens: bool | None) -> list[int]:
    """Token ids that the request adds. Special tokens (BOS) come at the beginning of a session only."""
    assert isinstance(item.prompt, str | list)
    media = arguments(item.images, item.videos)
    if isinstance(item.prompt, list) and not item.images and not item.videos:
        return item.prompt
    if item.prompt == "":
        return []
    request = TextGenerationRequest(
        RequestID(item.rid), prompt=item.prompt, add_special_tokens=add_special_tokens, **media
    )
    ids: list[int] = (await call.server.tokenizer.prompt(request, call.server.max_model_len)).tokens.tolist()
    return ids


def _kept(item: Item) -> list[SessionMedium]:
    """The images and videos of a turn as its session keeps them."""
    return [*map(_medium, item.images), *map(_medium, item.videos)]


def _known(item: Item) -> list[bool]:
    """Whether each of these comes from the turn that it continues."""
    fields = [image.options.field for image in item.images] + [video.options.field for video in item.videos]
    return [field == _FIELD for field in fields]


def _check_size(media: Sequence[SessionMedium]) -> None:
    """Refuses a turn that its session could not keep. Equal images count once. Raises RequestFailed."""
    if sum(len(file) for medium in media for file in medium.files) <= SESSION_MEDIA_BYTES:
        return
    different = {(medium.is_video, medium.options, *medium.files): medium.files for medium in media}
    size = sum(len(file) for files in different.values() for file in files)
    if size > SESSION_MEDIA_BYTES:
        raise invalid(
            f"session_params: the session and this request have images and videos of {size} bytes together; at most "
            f"{SESSION_MEDIA_BYTES} are possible: send smaller ones, or open another session",
            "session_params",
        )


def _medium(part: LoadedImage | LoadedVideo) -> SessionMedium:
    """An image or a video as a session keeps it."""
    is_frames = not isinstance(part.data, bytes)
    files = [part.data] if isinstance(part.data, bytes) else part.data
    wishes = {name: value for name, value in asdict(part.options).items() if name != "field"}
    return SessionMedium(files, isinstance(part, LoadedVideo), is_frames, orjson.dumps(wishes).decode())


async def _media(
    call: Call, known: NDArray[np.int32], kept: Sequence[SessionMedium]
) -> tuple[list[LoadedImage], list[LoadedVideo]]:
    """The images and videos of a session that are among its tokens. Raises RequestFailed when one of them is cut."""
    field = _FIELD
    images = []
    videos = []
    for medium in kept:
        wishes: dict[str, Any] = {"field": field, **orjson.loads(medium.options)}
        if medium.is_video:
            data = medium.files if medium.is_frames else medium.files[0]
            videos.append(LoadedVideo(data=data, options=VideoWishes(**wishes)))
        else:
            images.append(LoadedImage(data=medium.files[0], options=ImageWishes(**wishes)))
    if not kept:
        return images, videos
    request = TextGenerationRequest(RequestID(field), prompt=[0], **arguments(images, videos))
    pictures = await call.server.tokenizer.pictures(request)
    assert pictures is not None
    shown = replace(pictures, field=field).among(known)
    return (
        [image for image, is_shown in zip(images, shown, strict=False) if is_shown],
        [video for video, is_shown in zip(videos, shown[len(images) :], strict=True) if is_shown],
    )


async def _send(call: Call, action: int, session: str, **fields: Any) -> SessionAnswer:
    answer = await _ask(call, action, session, **fields)
    if answer.refused:
        raise invalid(answer.refused, "session_id" if action != SessionAction.RECALL else "session_params")
    return answer


async def _ask(call: Call, action: int, session: str, **fields: Any) -> SessionAnswer:
    try:
        return await call.server.engine.questions.session(action, session, **fields)
    except TimeoutError as error:
        reason = str(error) or "the scheduler does not answer"
        raise RequestFailed(ErrorKind.UNAVAILABLE, reason, retry_after=RETRY_AFTER_SECONDS) from None
