"""Videos as parts of messages: the videos of every dialect become one kind of part, with their bytes loaded.

A video is a file (base64, a data URI, a URL) or a list of images that are its frames. This module knows the forms of
such parts and the limits on their bytes; the bytes themselves are opened in the media process only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_server.chat.documents import replace_parts
from api_server.chat.images import Budget, ImageSource, Server, bytes_of, showing, url_source
from api_server.chat.media_parts import LoadedVideo
from api_server.errors import ErrorKind, RequestFailed, invalid
from interfaces import VideoWishes

# Most bytes of one video.
MOST_BYTES = 48 << 20
# Most bytes of all videos of a request.
MOST_BYTES_TOGETHER = 96 << 20
# Most frames that a client may send as images, or ask for.
MOST_FRAMES = 768
# Most files of all videos of a request, each frame that a client sends being one.
MOST_FILES = 768
# Highest number of frames for each second.
MOST_FPS = 240.0

# Types of parts, each with the key of the video.
_KINDS = {"video_url": "video_url", "video": "video", "input_video": "video_url"}
# A data URI of frames, with commas between them.
_FRAMES = ("data:video/jpeg;base64,", "data:video/png;base64,")
_OPTIONS = ("fps", "num_frames")


@dataclass(frozen=True)
class VideoSource:
    """The content of one video part: a file, or images that are its frames. `field` is the client's path to it."""

    field: str
    files: tuple[ImageSource, ...]
    is_frames: bool
    fps: float | None = None
    num_frames: int | None = None


async def load(
    server: Server,
    turns: Sequence[Any],
    path: str,
    options: Mapping[str, Any] | None = None,
    bounds: Mapping[str, int] | None = None,
) -> None:
    """Replaces every video in the turns' lists of parts by a LoadedVideo, in place. Raises RequestFailed.

    Nothing happens when the model has no eyes. `options` are fps and num_frames of videos that have none of their own;
    `bounds` may have min_pixels and max_pixels.
    """
    if not server.sees:
        return
    await replace_parts(
        showing(turns),
        path,
        lambda part, where: openai_part(part, where, options),
        lambda sources: load_sources(server, sources, path, bounds),
    )


async def load_sources(
    server: Server, sources: Sequence[VideoSource], path: str, bounds: Mapping[str, int] | None = None
) -> list[LoadedVideo]:
    """The bytes of videos, within the limits of one request. Raises RequestFailed."""
    most = server.settings.limit_images
    if len(sources) > most:
        raise invalid(f"{path} has {len(sources)} videos; at most {most} are possible in one request: send fewer", path)
    files = [file for source in sources for file in source.files]
    _check_files(files, most, path)
    data = iter(await bytes_of(server, files, Budget("video", MOST_BYTES, MOST_BYTES_TOGETHER, path)))
    loaded = []
    for source in sources:
        content = [next(data) for _ in source.files]
        wishes = VideoWishes(source.field, source.fps, source.num_frames, **(bounds or {}))
        loaded.append(LoadedVideo(data=content if source.is_frames else content[0], options=wishes))
    return loaded


def _check_files(files: Sequence[ImageSource], most_urls: int, path: str) -> None:
    """Refuses a request with too many frames, or with too many URLs to fetch. Raises RequestFailed."""
    if len(files) > MOST_FILES:
        raise invalid(
            f"{path} has videos of {len(files)} frames and files together; at most {MOST_FILES} are possible in one "
            "request: send fewer",
            path,
        )
    urls = sum(file.form == "url" for file in files)
    if urls > most_urls:
        raise invalid(
            f"{path} has videos with {urls} URLs; at most {most_urls} are possible in one request: send a video file, "
            "or the frames themselves as data URIs",
            path,
        )


def openai_part(part: Mapping[str, Any], path: str, options: Mapping[str, Any] | None = None) -> VideoSource | None:
    """A part of type `video_url` (a URL, or an object with url), `video` (its frames), or `input_video`."""
    kind = part.get("type")
    key = _KINDS.get(kind) if isinstance(kind, str) else None
    if key is None and kind is None and "video_url" in part:
        key = "video_url"
    if key is None:
        return None
    given = part.get(key, part.get("url"))
    inner = given if isinstance(given, Mapping) else {}
    own = {name: value for name, value in {**part, **inner}.items() if name in _OPTIONS and value is not None}
    return read_source(inner.get("url") if inner is given else given, f"{path}.{key}", own or options or {})


def read_source(given: Any, field: str, options: Mapping[str, Any], bare_base64: bool = False) -> VideoSource:
    """A video by its URL or data URI, or a list of those of its frames. Raises RequestFailed."""
    fps = _fps(options.get("fps"), field)
    num_frames = _num_frames(options.get("num_frames"), field)
    if fps is not None and num_frames is not None:
        raise invalid(f"{field}: fps and num_frames exclude each other: give one of them", field)
    if isinstance(given, str) and given.startswith(_FRAMES):
        rest = given.partition(",")[2]
        frames = [ImageSource(f"{field}[{i}]", "base64", frame) for i, frame in enumerate(rest.split(","))]
        return VideoSource(field, _counted(frames, field), True, fps)
    if isinstance(given, list):
        frames = [_file(frame, f"{field}[{i}]", bare_base64) for i, frame in enumerate(given)]
        return VideoSource(field, _counted(frames, field), True, fps)
    return VideoSource(field, (_file(given, field, bare_base64),), False, fps, num_frames)


def io_options(given: Mapping[str, Any] | None, path: str) -> dict[str, Any]:
    """fps and num_frames of vLLM's `media_io_kwargs`. Raises RequestFailed."""
    for name in given or {}:
        if name not in ("video", "image"):
            message = f"{path}.{name} is not supported by this server: give video"
            raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=f"{path}.{name}")
    options = (given or {}).get("video") or {}
    if not isinstance(options, Mapping):
        raise invalid(f"{path}.video must be an object, got {options!r:.60}", f"{path}.video")
    for name in options:
        if name not in _OPTIONS:
            message = f"{path}.video.{name} is not supported by this server: give {' or '.join(_OPTIONS)}"
            raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=f"{path}.video.{name}")
    # vLLM's clients write -1 for all frames.
    return {name: value for name, value in options.items() if value not in (None, -1)}


def _counted(frames: Sequence[ImageSource], field: str) -> tuple[ImageSource, ...]:
    if not 1 <= len(frames) <= MOST_FRAMES:
        raise invalid(f"{field} has {len(frames)} frames; 1 to {MOST_FRAMES} are possible", field)
    return tuple(frames)


def _file(given: Any, field: str, bare_base64: bool) -> ImageSource:
    if isinstance(given, Mapping):
        given = given.get("url")
    if not isinstance(given, str):
        raise invalid(f"{field} must be a URL, a data URI or a list of those of its frames, got {given!r:.60}", field)
    if bare_base64 and not given.lower().startswith(("http://", "https://", "data:")):
        return ImageSource(field, "base64", given)
    return url_source(given, field)


def _fps(given: Any, field: str) -> float | None:
    if given is None:
        return None
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not math.isfinite(given) or not 0 < given <= MOST_FPS:
        raise invalid(f"{field}: fps must be a number above 0 and at most {MOST_FPS:g}, got {given!r:.60}", field)
    return float(given)


def _num_frames(given: Any, field: str) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_FRAMES:
        raise invalid(f"{field}: num_frames must be an integer of 1 to {MOST_FRAMES}, got {given!r:.60}", field)
    return given
