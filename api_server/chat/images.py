"""Images as parts of messages: the images of every dialect become one kind of part, with their bytes loaded.

An image is sent as base64, in a data URI or by URL. Each dialect has a `Reader` for its form of such parts. This module
knows how a part becomes bytes, and the limits on them; `url_fetch.py` knows how a URL is fetched. The bytes themselves
are opened in the media process only.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from api_server.chat.documents import replace_parts
from api_server.chat.media_parts import LoadedImage
from api_server.chat.url_fetch import UrlFetcher
from api_server.engine import scheduling
from api_server.errors import ErrorKind, RequestFailed, invalid
from interfaces import ImageWishes
from shared.settings import Settings

# Most bytes of one image.
MOST_BYTES = 20 << 20
# Most bytes of all images of a request.
MOST_BYTES_TOGETHER = 64 << 20
DETAILS = ("low", "high", "auto", "original")
# Pixels that a client may ask for at most; the model's own limit and the operator's still hold.
MOST_PIXELS = 1 << 26

# Roles whose turns may show images; items without a role are results of tools. Other turns say in words that there was
# one.
_SHOWING = (None, "user", "tool", "function")
_ACCEPT = {
    "image": "image/png, image/jpeg, image/webp, image/gif, image/*;q=0.5",
    "video": "video/mp4, video/webm, video/*;q=0.8, image/gif;q=0.5, image/webp;q=0.5",
    "sound": "audio/wav, audio/mpeg, audio/flac, audio/*;q=0.8, video/webm;q=0.5, video/mp4;q=0.5",
}
# Beginnings of the types that an answer to a URL may name for each kind.
_DECLARED = {
    "image": ("image/",),
    "video": ("video/", "image/"),
    "sound": ("audio/", "video/", "application/ogg"),
}
# Longer base64 is decoded in a thread.
_LONG = 1 << 18


class Server(Protocol):
    """What a server does with images."""

    @property
    def settings(self) -> Settings: ...

    @property
    def sees(self) -> bool: ...

    @property
    def url_fetcher(self) -> UrlFetcher | None: ...


@dataclass(frozen=True)
class ImageSource:
    """The content of one image part. `field` is the path where the client wrote `value`."""

    field: str
    form: Literal["base64", "url"]
    value: str
    detail: str = "auto"


# Returns the image of a part at a path, or None for another kind of part. Raises RequestFailed.
Reader = Callable[[Mapping[str, Any], str], ImageSource | None]


async def load(
    server: Server, turns: Sequence[Any], path: str, reader: Reader, bounds: Mapping[str, int] | None = None
) -> None:
    """Replaces every image in the turns' lists of parts by a LoadedImage, in place. Raises RequestFailed.

    Nothing happens when the model has no eyes. `bounds` may have min_pixels and max_pixels.
    """
    if not server.sees:
        return
    await replace_parts(showing(turns), path, reader, lambda sources: load_sources(server, sources, path, bounds))


def showing(turns: Sequence[Any]) -> list[Any]:
    """The turns whose images and videos are shown, and None in the places of others."""
    return [turn if isinstance(turn, Mapping) and turn.get("role") in _SHOWING else None for turn in turns]


async def load_sources(
    server: Server, sources: Sequence[ImageSource], path: str, bounds: Mapping[str, int] | None = None
) -> list[LoadedImage]:
    """The bytes of images, within the limits of one request. Raises RequestFailed."""
    most = server.settings.limit_images
    if len(sources) > most:
        raise invalid(f"{path} has {len(sources)} images; at most {most} are possible in one request: send fewer", path)
    loaded = await bytes_of(server, sources, Budget("image", MOST_BYTES, MOST_BYTES_TOGETHER, path))
    options = [ImageWishes(source.field, source.detail, **(bounds or {})) for source in sources]
    return [LoadedImage(data=data, options=each) for data, each in zip(loaded, options, strict=True)]


async def bytes_of(server: Server, sources: Sequence[ImageSource], budget: Budget) -> list[bytes]:
    """The bytes of images, videos or sounds, fetched all at once. Raises RequestFailed."""
    if not sources:
        return []
    try:
        async with scheduling.spending(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(_bytes(server.url_fetcher, source, budget)) for source in sources]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def openai_part(part: Mapping[str, Any], path: str) -> ImageSource | None:
    """OpenAI's parts: `image_url` of a chat, and `input_image` of the Responses API."""
    kind = part.get("type")
    if kind not in ("image_url", "input_image") and not (kind is None and "image_url" in part):
        return None
    field = f"{path}.image_url"
    given = part.get("image_url")
    if part.get("file_id") is not None:
        where = f"{path}.file_id"
        message = f"{where}: this server keeps no files: send the image itself as image_url"
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=where)
    detail = part.get("detail")
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given = given.get("url")
    if not isinstance(given, str):
        raise invalid(f"{field} must be a URL or a data URI, got {given!r:.60}", field)
    return replace(url_source(given, field), detail=_detail(detail, path))


def url_source(url: str, field: str) -> ImageSource:
    """The image of a URL or of a data URI. Raises RequestFailed(INVALID)."""
    if url[:5].lower() == "data:":
        declared, comma, rest = url[len("data:") :].partition(",")
        if not comma or not declared.lower().rstrip().endswith(";base64"):
            raise invalid(f'{field} must be a URL, or "data:TYPE;base64," and base64, got {url!r:.60}', field)
        return ImageSource(field, "base64", rest)
    if url[:7].lower() == "http://" or url[:8].lower() == "https://":
        return ImageSource(field, "url", url)
    raise invalid(f"{field} must be an http or https URL or a data URI, got {url!r:.60}", field)


def pixel_bounds(given: Mapping[str, Any] | None, path: str) -> dict[str, int]:
    """`min_pixels` and `max_pixels` of `mm_processor_kwargs`. Raises RequestFailed."""
    for name, value in (given or {}).items():
        where = f"{path}.{name}"
        if name not in ("min_pixels", "max_pixels"):
            message = f"{where} is not supported by this server: give min_pixels or max_pixels"
            raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=where)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_PIXELS:
            raise invalid(f"{where} must be an integer of 1 to {MOST_PIXELS}, got {value!r:.60}", where)
    found = dict(given or {})
    if found.get("min_pixels", 1) > found.get("max_pixels", MOST_PIXELS):
        raise invalid(f"{path}.min_pixels must be at most max_pixels, got {found['min_pixels']}", f"{path}.min_pixels")
    return found


def _detail(given: Any, path: str) -> str:
    if given is None:
        return "auto"
    if given not in DETAILS:
        raise invalid(f"{path}.detail must be one of {', '.join(DETAILS)}, got {given!r:.60}", f"{path}.detail")
    return str(given)


class Budget:
    """The bytes that the images, the videos or the sounds of one request may still have."""

    def __init__(self, kind: str, most: int, most_together: int, path: str) -> None:
        """`kind` is "image", "video" or "sound"."""
        self.kind = kind
        self.most = most
        self._most_together = self._left = most_together
        self._path = path

    @property
    def name(self) -> str:
        """The kind with its article."""
        return f"an {self.kind}" if self.kind == "image" else f"a {self.kind}"

    def take(self, size: int, field: str) -> None:
        """Takes the bytes of an image. Raises RequestFailed(INVALID)."""
        if size > self.most:
            raise invalid(f"{field} is {self.name} of {size} bytes; at most {self.most} are possible: shrink it", field)
        self._left -= size
        if self._left < 0:
            raise invalid(
                f"{self._path} has {self.kind}s of more than {self._most_together} bytes together: send fewer or "
                "smaller ones",
                self._path,
            )


async def _bytes(fetcher: UrlFetcher | None, source: ImageSource, budget: Budget) -> bytes:
    field = source.field
    if source.form == "base64":
        budget.take(len(source.value) // 4 * 3, field)
        if len(source.value) < _LONG:
            return _decoded(source.value, field)
        return await asyncio.to_thread(_decoded, source.value, field)
    if fetcher is None:
        message = (
            f"{field}: this server fetches no URLs: send the {budget.kind} itself (its operator may set --fetch-hosts)"
        )
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=field)
    fetched = await fetcher.fetch(source.value, field, budget.most, _ACCEPT[budget.kind])
    declared = fetched.content_type.partition(";")[0].strip().lower()
    if declared and not declared.startswith(_DECLARED[budget.kind]) and not declared.endswith("/octet-stream"):
        raise invalid(f"{field} leads to content of type {declared[:100]!r}, which is no {budget.kind}", field)
    budget.take(len(fetched.body), field)
    return fetched.body


def _decoded(data: str, field: str) -> bytes:
    packed = "".join(data.split())
    try:
        return base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{field} is not valid base64: {error}", field) from None
