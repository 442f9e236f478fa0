"""Images, videos and sounds as parts of messages whose bytes have been loaded, and as arguments of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from interfaces import (
    ImageContentPart,
    ImageWishes,
    SoundContentPart,
    TextGenerationRequestMessage,
    VideoContentPart,
    VideoWishes,
)


class LoadedImage(ImageContentPart):
    """An image part whose bytes have been loaded."""

    data: bytes = Field(repr=False)
    options: ImageWishes


class LoadedVideo(VideoContentPart):
    """A video part whose bytes have been loaded: a file, or images that are its frames."""

    data: bytes | list[bytes] = Field(repr=False)
    options: VideoWishes


class LoadedSound(SoundContentPart):
    """A sound part whose bytes have been loaded. `field` is the client's path to it."""

    data: bytes = Field(repr=False)
    field: str


LOADED = LoadedImage | LoadedVideo | LoadedSound


def of_messages(messages: Sequence[TextGenerationRequestMessage]) -> dict[str, Any]:
    """The arguments of a TextGenerationRequest for the media in its messages, in order."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    images = [part for part in parts if isinstance(part, LoadedImage)]
    videos = [part for part in parts if isinstance(part, LoadedVideo)]
    return arguments(images, videos, [part for part in parts if isinstance(part, LoadedSound)])


def arguments(
    images: Sequence[LoadedImage], videos: Sequence[LoadedVideo] = (), sounds: Sequence[LoadedSound] = ()
) -> dict[str, Any]:
    """The arguments of a TextGenerationRequest for images, videos and sounds."""
    return {
        "images": [image.data for image in images],
        "image_wishes": [image.options for image in images],
        "videos": [video.data for video in videos],
        "video_wishes": [video.options for video in videos],
        "sounds": [sound.data for sound in sounds],
        "sound_fields": [sound.field for sound in sounds],
    }
