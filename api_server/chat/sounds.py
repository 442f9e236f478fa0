"""Sounds as parts of messages: the sounds of every dialect become one kind of part, with their bytes loaded.

A sound is a file: base64, a data URI or a URL. This module knows the forms of such parts and the limits on their bytes;
the bytes themselves are opened in the media process only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from api_server.chat.documents import replace_parts
from api_server.chat.images import Budget, ImageSource, bytes_of, showing, url_source
from api_server.chat.images import Server as SeeingServer
from api_server.chat.media_parts import LoadedSound
from api_server.errors import invalid

# Most bytes of one sound file.
MOST_BYTES = 48 << 20
# Most bytes of all sounds of a request.
MOST_BYTES_TOGETHER = 64 << 20

# Beginnings of texts that are no bare base64.
_SCHEMES = ("http://", "https://", "data:")


class Server(SeeingServer, Protocol):
    """What a server does with sounds."""

    @property
    def listens(self) -> bool: ...


async def load(server: Server, turns: Sequence[Any], path: str) -> None:
    """Replaces every sound in the turns' lists of parts by a LoadedSound, in place. Raises RequestFailed.

    Nothing happens when the model has no ears.
    """
    if server.listens:
        await replace_parts(showing(turns), path, openai_part, lambda sources: load_sources(server, sources, path))


async def load_sources(server: Server, sources: Sequence[ImageSource], path: str) -> list[LoadedSound]:
    """The bytes of sounds, within the limits of one request. Raises RequestFailed."""
    most = server.settings.limit_images
    if len(sources) > most:
        raise invalid(f"{path} has {len(sources)} sounds; at most {most} are possible in one request: send fewer", path)
    loaded = await bytes_of(server, sources, Budget("sound", MOST_BYTES, MOST_BYTES_TOGETHER, path))
    return [LoadedSound(data=data, field=source.field) for data, source in zip(loaded, sources, strict=True)]


def openai_part(part: Mapping[str, Any], path: str) -> ImageSource | None:
    """A part of type `input_audio` (an object with data) or `audio_url` (a URL, or an object with url)."""
    kind = part.get("type")
    if kind == "input_audio":
        given = part.get("input_audio")
        if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
            raise invalid(f"{path}.input_audio must be an object with data, which is base64", f"{path}.input_audio")
        # The file says by itself what it is, so its format is not read.
        return source_of(given["data"], f"{path}.input_audio.data")
    if kind != "audio_url" and not (kind is None and "audio_url" in part):
        return None
    given = part.get("audio_url")
    field = f"{path}.audio_url"
    if isinstance(given, Mapping):
        given = given.get("url")
    if not isinstance(given, str):
        raise invalid(f"{field} must be a URL or a data URI, got {given!r:.60}", field)
    return url_source(given, field)


def source_of(given: str, field: str) -> ImageSource:
    """The sound of a URL, a data URI or bare base64. Raises RequestFailed(INVALID)."""
    if given[:8].lower().startswith(_SCHEMES):
        return url_source(given, field)
    return ImageSource(field, "base64", given)
