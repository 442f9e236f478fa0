"""The images and videos of requests as arrays, each processed once while it is in the cache.

Clients send a conversation's images again with each turn, so that a hit costs only the hash of its bytes. Equal images
that arrive together share one computation, and hits never wait behind it. Videos leave room in the media process for
images, and what no request waits for any more is not read. Knows the cache and the owner of its arrays; the media
process knows how images are read.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid
from api_server.media.client import MediaClient, ProcessLost
from api_server.media.facts import ImageFacts
from api_server.media.processors import Vision
from api_server.media.protocol import Answer, jobs_at_once, unpacked
from interfaces import ImageWishes, Segments, Shareable, SharedMemoryArray, VideoWishes

# Most images and videos that are being processed or wait for it, and most videos among them.
MOST_WAITING = 256
MOST_VIDEOS_WAITING = 32
# Most bytes of these images.
MOST_WAITING_BYTES = 256 << 20
# Most bytes of the features of sounds: of requests that run or wait, and of files that are read. What is kept for
# requests to come counts apart.
MOST_FEATURE_BYTES = 2 << 30
# Most seconds of all sounds of a request.
MOST_SECONDS = 3600
# Names of segments that go with a job. Few arrays of an image are large.
_NAMES = 3
# Up to this number of images a request cannot have too many pixels together.
_CANNOT_BE_TOO_LARGE = 3
# Images that the media process has at once for each that it reads. The others wait here, where they can be dropped.
_SENT_FOR_EACH = 2
# Share of the cache that one image or video may take.
_LARGEST_SHARE = 0.5
# Attempts at an image. The process may have died of something else.
_ATTEMPTS = 2


@dataclass(eq=False)
class ProcessedImage:
    """One image, video or sound as the model takes it.

    Its arrays live as long as this object, or longer while a request holds them.
    """

    arrays: dict[str, Shareable]
    # The text that stands for the image in a prompt.
    run: str
    # Names the content to the prefix cache, in 63 bits.
    image_hash: int
    # Whether it stands at the placeholder of a video.
    is_clip: bool = False
    # Whether the model takes it as a video, and not as an image of many tiles.
    is_video: bool = False
    # Length of a sound; 0 for an image.
    seconds: float = 0.0

    @property
    def pixel_values(self) -> Shareable:
        return self.arrays["pixel_values"]

    @property
    def extras(self) -> dict[str, Shareable]:
        """The other arrays, by the names of parameters of the model."""
        return {name: array for name, array in self.arrays.items() if name != "pixel_values"}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + len(self.run)


@dataclass(eq=False)
class _Coming:
    """An image or a video that is being processed or waits for it."""

    size: int
    is_clip: bool
    # Requests that wait for it.
    waiters: int = 0
    # Whether the media process has it, which reads it to the end.
    is_sent: bool = False
    task: asyncio.Task[ProcessedImage] = field(init=False)


def _image_slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(jobs_at_once() * _SENT_FOR_EACH)


def _video_slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(jobs_at_once() - 1)


@dataclass
class Images:
    """The processed images of one API process.

    `limits` are the most tokens of an image and of a video. `segments` own the arrays; None: arrays travel in
    messages. `key` makes the hashes such that no client can search for two images of one hash.
    `observe` is called for each image with the seconds of its processing, 0 for a hit, and `heard` for each sound that
    is read, with its length and the seconds of its processing. `most_videos` are the most videos of one request.
    """

    facts: ImageFacts
    client: MediaClient
    limits: tuple[int, int]
    segments: Segments | None
    most_bytes: int
    key: bytes
    observe: Callable[[float], None] = lambda seconds: None
    most_videos: int = MOST_VIDEOS_WAITING
    heard: Callable[[float, float], None] = lambda seconds, took: None
    _kept: OrderedDict[bytes, ProcessedImage] = field(default_factory=OrderedDict)
    _kept_bytes: int = 0
    _coming: dict[bytes, _Coming] = field(default_factory=dict)
    _coming_bytes: int = 0
    _feature_bytes: int = 0
    _image_slots: asyncio.Semaphore = field(default_factory=_image_slots)
    _video_slots: asyncio.Semaphore = field(default_factory=_video_slots)

    async def vision(self) -> Vision:
        """Facts of the model. Raises RequestFailed when its images cannot be processed here."""
        vision = await self.facts.read()
        return replace(vision, fingerprint=f"{vision.fingerprint}\0{self.limits}")

    async def processed(self, images: Sequence[bytes], options: Sequence[ImageWishes]) -> list[ProcessedImage]:
        """Processes the images of a request. Raises RequestFailed that names the image by its field."""
        vision = await self.vision()
        if vision.is_sound:
            raise RequestFailed(ErrorKind.UNSUPPORTED, f"this model takes no images: {vision.no_videos}")
        given = [*options] or [ImageWishes(f"images[{i}]") for i in range(len(images))]
        keys = await asyncio.to_thread(lambda: [self._hash(*each, vision) for each in zip(images, given, strict=True)])
        new = [i for i, key in enumerate(keys) if key not in self._kept]
        if len(new) > _CANNOT_BE_TOO_LARGE:
            await self._check_sizes([images[i] for i in new], [given[i] for i in new])
        jobs = [_image_job(image, options) for image, options in zip(images, given, strict=True)]
        return await self._all(keys, jobs, [each.field for each in given], "image")

    async def processed_videos(
        self, videos: Sequence[bytes | list[bytes]], options: Sequence[VideoWishes]
    ) -> list[ProcessedImage]:
        """Processes the videos of a request. Raises RequestFailed that names the video by its field."""
        vision = await self.vision()
        if not vision.video_placeholder:
            raise RequestFailed(ErrorKind.UNSUPPORTED, f"this model takes no videos on this server: {vision.no_videos}")
        given = [*options] or [VideoWishes(f"videos[{i}]") for i in range(len(videos))]
        jobs = [_video_job(video, wishes) for video, wishes in zip(videos, given, strict=True)]
        keys = await asyncio.to_thread(
            lambda: [self._hash_video(*each, vision) for each in zip(videos, given, strict=True)]
        )
        return await self._all(keys, jobs, [each.field for each in given], "video")

    async def processed_sounds(self, sounds: Sequence[bytes], fields: Sequence[str]) -> list[ProcessedImage]:
        """Processes the sounds of a request. Raises RequestFailed that names the sound by its field."""
        vision = await self.vision()
        if not vision.is_sound:
            raise RequestFailed(ErrorKind.UNSUPPORTED, "this model takes no sounds: it sees images, and hears nothing")
        given = [*fields] or [f"sounds[{i}]" for i in range(len(sounds))]
        plain = ImageWishes()
        keys = await asyncio.to_thread(lambda: [self._hash(sound, plain, vision) for sound in sounds])
        return await self._all(
            keys, [_image_job(sound, plain) for sound in sounds], given, "sound", vision.most_sound_bytes
        )

    @property
    def feature_bytes(self) -> int:
        """The bytes of all features of sounds that are held, or may come of files that are read."""
        return self._feature_bytes

    async def _all(
        self, keys: Sequence[bytes], jobs: Sequence[dict[str, Any]], fields: Sequence[str], kind: str, largest: int = 0
    ) -> list[ProcessedImage]:
        found: list[ProcessedImage | _Coming] = []
        made: list[ProcessedImage] = []
        seconds = 0.0
        try:
            for key, job in zip(keys, jobs, strict=True):
                found.append(self._find(key, job, largest))
            for image, where in zip(found, fields, strict=True):
                # A task is shielded: when the client goes away, others may wait for the same image.
                made.append(image if isinstance(image, ProcessedImage) else await asyncio.shield(image.task))
                seconds += made[-1].seconds
                if seconds > MOST_SECONDS:
                    most = f"at most {MOST_SECONDS} s are possible: send fewer, or shorter ones"
                    raise invalid(
                        f"{where}: the sounds of the request up to this one take {seconds:g} s; {most}", where
                    )
            return made
        except _Refused as refused:
            where = next(fields[i] for i, image in enumerate(found) if _has_failed(image, refused))
            raise invalid(f"{where}: the {kind} {refused}", where) from None
        finally:
            for key, image in zip(keys, found, strict=False):
                if isinstance(image, _Coming):
                    self._leave(key, image)

    def _find(self, key: bytes, job: dict[str, Any], largest: int) -> ProcessedImage | _Coming:
        """The image, or what it comes from, which one more request waits for until it leaves.

        `largest` are the most bytes that its arrays may take; 0: they do not count.
        """
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            if not kept.seconds:
                self.observe(0.0)
            return kept
        coming = self._coming.get(key)
        if coming is None:
            coming = _Coming(len(job["image"]) + sum(map(len, job["video"])), bool(job["video"]))
            self._check_room(coming)
            self._check_features(largest)
            coming.task = asyncio.create_task(self._process(key, job, coming, largest))
            self._coming[key] = coming
            self._coming_bytes += coming.size
            coming.task.add_done_callback(lambda task: self._done(key, coming, task))
        coming.waiters += 1
        return coming

    def _check_room(self, new: _Coming) -> None:
        clips = sum(coming.is_clip for coming in self._coming.values())
        most_clips = max(MOST_VIDEOS_WAITING, self.most_videos)
        if new.is_clip and clips >= most_clips:
            message = f"{clips} videos wait to be read; retry later"
        elif len(self._coming) >= MOST_WAITING or self._coming_bytes + new.size > MOST_WAITING_BYTES:
            message = f"{len(self._coming)} images wait to be read; retry later"
        else:
            return
        raise RequestFailed(ErrorKind.OVERLOADED, message, retry_after=RETRY_AFTER_SECONDS)

    def _check_features(self, largest: int) -> None:
        """Raises RequestFailed when no room is left for the features of one more sound."""
        most = MOST_FEATURE_BYTES + self.most_bytes
        if largest and self._feature_bytes and self._feature_bytes + largest > most:
            message = f"sounds of open requests take {self._feature_bytes >> 20} MiB of memory; retry later"
            raise RequestFailed(ErrorKind.OVERLOADED, message, retry_after=RETRY_AFTER_SECONDS)

    def _leave(self, key: bytes, coming: _Coming) -> None:
        """A request waits no more. What waits for its turn is dropped with the last one."""
        coming.waiters -= 1
        if coming.waiters == 0 and not coming.is_sent and not coming.task.done():
            coming.task.cancel()
            self._remove(key, coming)

    def _remove(self, key: bytes, coming: _Coming) -> None:
        if self._coming.get(key) is coming:
            del self._coming[key]
            self._coming_bytes -= coming.size

    def _done(self, key: bytes, coming: _Coming, task: asyncio.Task[ProcessedImage]) -> None:
        self._remove(key, coming)
        if task.cancelled() or task.exception() is not None:
            return
        image = task.result()
        if image.nbytes > self.most_bytes * _LARGEST_SHARE:
            return  # it would take the place of all others
        self._kept[key] = image
        self._kept_bytes += image.nbytes
        while self._kept_bytes > self.most_bytes and self._kept:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    async def _process(self, key: bytes, job: dict[str, Any], coming: _Coming, largest: int) -> ProcessedImage:
        began = time.monotonic()
        async with self._video_slots if coming.is_clip else self._image_slots:
            self._check_features(largest)
            coming.is_sent = True
            self._feature_bytes += largest
            try:
                found = await self._ask(job)
            except BaseException:
                self._feature_bytes -= largest
                raise
        took = time.monotonic() - began
        if "seconds" in found:
            self.heard(found["seconds"], took)
        else:
            self.observe(took)
        arrays = {name: unpacked(array) for name, array in found["arrays"].items()}
        image_hash = int.from_bytes(key[:8], "little") >> 1
        is_clip = bool(job["video"])
        is_video = bool(found.get("is_video"))
        made = ProcessedImage(arrays, found["run"], image_hash, is_clip, is_video, found.get("seconds", 0.0))
        if largest:
            self._feature_bytes -= largest - made.nbytes
            # A request holds the array itself when this object has gone.
            held = made.pixel_values
            weakref.finalize(held, _release, self._release_features, made.nbytes, asyncio.get_running_loop())
        self._release_after(made)
        return made

    def _release_features(self, size: int) -> None:
        self._feature_bytes -= size

    async def _ask(self, job: dict[str, Any]) -> Answer:
        """Asks the media process, once more if it has died. Raises _Refused and RequestFailed."""
        for _ in range(_ATTEMPTS):
            names = [self.segments.reserve() for _ in range(_NAMES)] if self.segments is not None else []
            used: set[str] = set()
            try:
                answer = await self.client.ask(job | {"segments": names})
                if "error" in answer:
                    raise _Refused(answer["error"], answer.get("index", 0))
                used = {name for name, *_ in answer.get("arrays", {}).values() if isinstance(name, str)}
                return answer
            except ProcessLost:
                continue
            finally:
                if self.segments is not None:
                    self.segments.free(name for name in names if name not in used)
        raise _lost()

    def _release_after(self, image: ProcessedImage) -> None:
        """Has the segments of an image released when the last user of the object is gone."""
        held = [array for array in image.arrays.values() if isinstance(array, SharedMemoryArray)]
        if held and self.segments is not None:
            weakref.finalize(image, _release, self.segments.release, held, asyncio.get_running_loop())

    async def _check_sizes(self, images: Sequence[bytes], options: Sequence[ImageWishes]) -> None:
        """Refuses a request whose images have too many pixels together, by their headers."""
        try:
            async with self._image_slots:
                await self._ask(_job(measure=list(images)))
        except _Refused as refused:
            where = options[refused.index].field
            raise invalid(f"{where}: the image {refused}", where) from None

    def _hash(self, image: bytes, options: ImageWishes, vision: Vision) -> bytes:
        settings = f"{vision.fingerprint}\0{options.detail}\0{options.min_pixels}\0{options.max_pixels}"
        digest = blake2b(image, key=self.key, digest_size=16, person=b"tokenyard")
        digest.update(blake2b(settings.encode(), digest_size=16).digest())
        return digest.digest()

    def _hash_video(self, video: bytes | list[bytes], options: VideoWishes, vision: Vision) -> bytes:
        files = [video] if isinstance(video, bytes) else video
        digest = blake2b(key=self.key, digest_size=16, person=b"tokenyard video")
        for file in files:
            digest.update(blake2b(file, key=self.key, digest_size=16).digest())
        wishes = replace(options, field=vision.fingerprint)
        digest.update(f"{isinstance(video, bytes)}\0{wishes}".encode())
        return digest.digest()


def _image_job(image: bytes, options: ImageWishes) -> dict[str, Any]:
    return _job(image=image, detail=options.detail, pixels=_bounds(options))


def _video_job(video: bytes | list[bytes], options: VideoWishes) -> dict[str, Any]:
    is_frames = not isinstance(video, bytes)
    files = [video] if isinstance(video, bytes) else list(video)
    wishes = {"fps": options.fps or 0.0, "num_frames": options.num_frames or 0}
    return _job(video=files, is_frames=is_frames, pixels=_bounds(options), **wishes)


def _job(**given: Any) -> dict[str, Any]:
    """A job of the media process (protocol.py), without its number and its segments."""
    usual = {"measure": [], "image": b"", "detail": "", "pixels": {}}
    return usual | {"video": [], "is_frames": False, "fps": 0.0, "num_frames": 0} | given


def _bounds(options: ImageWishes | VideoWishes) -> dict[str, int]:
    bounds = {"min_pixels": options.min_pixels, "max_pixels": options.max_pixels}
    return {name: value for name, value in bounds.items() if value is not None}


class _Refused(Exception):
    """An image that cannot be used; the message ends a sentence about it."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def _has_failed(image: ProcessedImage | _Coming, error: _Refused) -> bool:
    return isinstance(image, _Coming) and image.task.done() and image.task.exception() is error


def _release(release: Callable[[Any], None], held: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Releases on the loop's thread, which is the only one that counts holders and bytes."""
    if loop.is_closed():
        release(held)
    else:
        loop.call_soon_threadsafe(release, held)


def _lost() -> RequestFailed:
    text = "the process that reads images has died; retry"
    return RequestFailed(ErrorKind.UNAVAILABLE, text, retry_after=RETRY_AFTER_SECONDS)
