"""Images and videos as parts of messages whose bytes have been loaded, and as arguments of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from interfaces import (
    ImageContentPart,
    ImageWishes,
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


def of_messages(messages: Sequence[TextGenerationRequestMessage]) -> dict[str, Any]:
    """The arguments of a TextGenerationRequest for the images and videos in its messages, in order."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    images = [part for part in parts if isinstance(part, LoadedImage)]
    return arguments(images, [part for part in parts if isinstance(part, LoadedVideo)])


def arguments(images: Sequence[LoadedImage], videos: Sequence[LoadedVideo] = ()) -> dict[str, Any]:
    """The arguments of a TextGenerationRequest for images and videos."""
    return {
        "images": [image.data for image in images],
        "image_wishes": [image.options for image in images],
        "videos": [video.data for video in videos],
        "video_wishes": [video.options for video in videos],
    }
