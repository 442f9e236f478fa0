"""Opens a video, or images that are its frames, and gives the frames that are asked for. In the media process only.

Knows PyAV, which an extra brings along, and Pillow for animations and for frames that are images. A container is opened
by its own first bytes: ffmpeg's guesses also try formats that open other files. Knows no model.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from api_server.media.decode import MOST_PIXELS, ImageRefused, decoded, flat, opened, reason

# Longest video, in seconds. The processor time of a child ends most of them sooner: each frame up to the last one that
# the model sees is decoded.
MOST_SECONDS = 3600.0
# Most frames of a video file. They are counted, and decoded up to the last one that the model sees.
MOST_FILE_FRAMES = 200_000
# Most frames that a model is shown.
MOST_FRAMES = 768
# Frames for each second of a video that does not say it. transformers takes this number, too.
USUAL_FPS = 24.0
MISSING = (
    "cannot be read: this server reads videos only as frames or as animated GIF or WebP, because the package av is "
    "missing; its operator may install tokenyard[video]"
)

# ffmpeg's name of a container, by the bytes that it has at a place.
_CONTAINERS = (
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
    (0, b"OggS", "ogg"),
    (0, b"FLV\x01", "flv"),
    (0, b"\x00\x00\x01\xba", "mpeg"),
)
_CONTAINERS_READ = "MP4, MOV, WebM, MKV, AVI, OGG, FLV, MPEG or MPEG-TS"
_TS_PACKET = 188
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True)
class Clip:
    """Facts of a video: the number of its frames, frames for each second, and seconds."""

    count: int
    fps: float
    seconds: float
    width: int
    height: int


class Source(Protocol):
    """An opened video."""

    @property
    def clip(self) -> Clip: ...

    # False when the client chose the frames, so that all are shown.
    @property
    def is_sampled(self) -> bool: ...

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of ascending indices, upright and in RGB. Raises ImageRefused."""


def warm_up() -> None:
    """Imports what reads video files, if it is installed, so that no child has to."""
    with contextlib.suppress(ImportError):
        import av  # noqa: F401


def open_video(files: Sequence[bytes], is_frames: bool, fps: float | None) -> Source:
    """Opens a video file, or images that are its frames. Raises ImageRefused.

    `fps` is the number of frames for each second, where the client gives frames.
    """
    if is_frames:
        return _Frames(files, fps)
    (data,) = files
    name = _container_of(data)
    if name is not None:
        return _File(data, name)
    return _Animation(data)


def _container_of(data: bytes) -> str | None:
    for place, magic, name in _CONTAINERS:
        if data[place : place + len(magic)] == magic:
            return name
    is_ts = len(data) > 2 * _TS_PACKET and all(data[i * _TS_PACKET] == 0x47 for i in range(3))
    return "mpegts" if is_ts else None


def _checked(clip: Clip) -> Clip:
    if clip.count < 1:
        raise ImageRefused("has no frames")
    if clip.count > MOST_FILE_FRAMES:
        raise ImageRefused(f"has more than {MOST_FILE_FRAMES} frames: send a shorter one")
    if not 0 < clip.fps < float("inf"):
        raise ImageRefused("does not say how many frames it has for each second: send it in another container")
    if clip.seconds > MOST_SECONDS:
        most = f"at most {MOST_SECONDS:g} s are possible"
        raise ImageRefused(f"is {clip.seconds:.0f} s long; {most}: send a shorter one")
    _check_size(clip.width, clip.height)
    return clip


class _Frames:
    """Frames that the client has chosen, each an image file."""

    is_sampled = False

    def __init__(self, files: Sequence[bytes], fps: float | None) -> None:
        if len(files) > MOST_FRAMES:
            raise ImageRefused(f"has {len(files)} frames; at most {MOST_FRAMES} are possible: send fewer")
        self._files = files
        width, height = (0, 0) if not files else _of_frame(0, lambda: opened(files[0]).size)
        rate = fps or USUAL_FPS
        self.clip = _checked(Clip(len(files), rate, len(files) / rate, width, height))

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            data = self._files[index]
            yield _of_frame(index, lambda data=data: decoded(data))  # type: ignore[misc]


def _of_frame(index: int, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ImageRefused as refused:
        raise ImageRefused(f"has a frame, number {index}, that {refused}") from None


class _Animation:
    """An animated GIF, WebP or PNG; an image that does not move is a video of one frame."""

    is_sampled = True

    def __init__(self, data: bytes) -> None:
        if not _is_image(data):
            raise ImageRefused(
                f"is no video that can be read here: send {_CONTAINERS_READ}, an animated GIF or WebP, or its frames"
            )
        self._image = opened(data)
        self.clip = _guarded(self._measured)

    def _measured(self) -> Clip:
        image = self._image
        count = int(getattr(image, "n_frames", 1))
        if count > MOST_FRAMES * 16:
            raise ImageRefused(f"has {count} frames; an animation may have {MOST_FRAMES * 16}: send a video file")
        milliseconds = 0.0
        for index in range(count):
            image.seek(index)
            if image.format != "GIF":
                image.load()  # the time of a frame is known once it is decoded
            milliseconds += float(image.info.get("duration", 0) or 0)
        seconds = milliseconds / 1000 or count / USUAL_FPS
        return _checked(Clip(count, count / seconds, seconds, *image.size))

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            yield _guarded(lambda index=index: self._frame(index))  # type: ignore[misc]

    def _frame(self, index: int) -> Image.Image:
        self._image.seek(index)
        self._image.load()
        return flat(self._image.copy())


def _is_image(data: bytes) -> bool:
    """Whether the bytes begin as those of an image that may move do."""
    return data[:6] in (b"GIF87a", b"GIF89a") or data[8:12] == b"WEBP" or data[:4] == b"\x89PNG"


class _File:
    """A video file, decoded by ffmpeg."""

    is_sampled = True

    def __init__(self, data: bytes, container: str) -> None:
        try:
            import av
        except ImportError:
            raise ImageRefused(MISSING) from None
        self._av: Any = av
        self._data = data
        self._container = container
        self.clip = _guarded(self._measured)

    def _opened(self) -> tuple[Any, Any]:
        """The container, and its first stream of pictures."""
        # No address and no other file is opened, whatever the file names.
        options = {"protocol_whitelist": "none"}
        container = self._av.open(io.BytesIO(self._data), format=self._container, container_options=options)
        streams = [stream for stream in container.streams.video if "attached_pic" not in str(stream.disposition)]
        if not streams:
            raise ImageRefused("has no pictures: send a video")
        stream = streams[0]
        if stream.codec_context is None:
            raise ImageRefused("has pictures in a form that cannot be decoded here: send H.264, VP9 or AV1")
        stream.thread_type = "NONE"
        # The decoder of AV1 has threads of its own, by default one for each core of the host. So has `to_ndarray`.
        stream.codec_context.thread_count = 1
        return container, stream

    def _measured(self) -> Clip:
        container, stream = self._opened()
        with container:
            _check_size(int(stream.codec_context.width), int(stream.codec_context.height))
            packets = 0
            for packet in container.demux(stream):
                packets += packet.size > 0
                if packets > MOST_FILE_FRAMES:
                    break
            # A packet need not be shown, and a header may say anything.
            said = int(stream.frames or 0)
            count = said if 0 < said <= packets else packets
            rate = stream.average_rate or stream.guessed_rate
            fps = float(rate) if rate else 0.0
        first = next(self._decoded(), None)
        if first is None:
            raise ImageRefused("is damaged: not one frame can be decoded")
        sides = (first.height, first.width) if _turn(first) in (90, 270) else (first.width, first.height)
        return _checked(Clip(count, fps, count / fps if fps > 0 else 0.0, *sides))

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        wanted = list(indices)
        last = None
        pictures = enumerate(self._decoded())
        index = -1
        for want in wanted:
            while index < want:
                try:
                    index, picture = _guarded(lambda: next(pictures))
                except StopIteration:
                    break
                last = picture
            if last is None:
                raise ImageRefused("is damaged: its frames cannot be decoded")
            # A file may have a few frames less than packets; then the last one stands.
            yield _guarded(lambda last=last: self._image(last))  # type: ignore[misc]

    def _decoded(self) -> Iterator[Any]:
        container, stream = self._opened()
        with container:
            yield from container.decode(stream)

    def _image(self, frame: Any) -> Image.Image:
        _check_size(frame.width, frame.height)
        image: Image.Image = Image.fromarray(frame.to_ndarray(format="rgb24", threads=1))
        turn = _turn(frame)
        return image.transpose(_TURNS[turn]) if turn in _TURNS else image


def _turn(frame: Any) -> int:
    """Degrees, counterclockwise, by which a frame is turned to be seen upright."""
    return round(getattr(frame, "rotation", 0) or 0) % 360


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ImageRefused("has no pixels")
    if width * height > MOST_PIXELS:
        most = f"at most {MOST_PIXELS} are possible"
        raise ImageRefused(f"has frames of {width} x {height} pixels; {most}: send a smaller one")


def _guarded(read: Callable[[], Any]) -> Any:
    """What `read` returns. Raises ImageRefused for whatever a decoder raises over the bytes of strangers."""
    try:
        return read()
    except (ImageRefused, MemoryError, StopIteration):
        raise
    except Exception as error:
        raise ImageRefused(f"is damaged or cut off ({reason(error)}): send the whole file") from None
