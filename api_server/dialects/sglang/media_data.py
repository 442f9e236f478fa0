"""Loads SGLang's `image_data`, `video_data` and `audio_data`: URLs, data URIs and bare base64, and no local file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from api_server.body.item_limits import check_count
from api_server.chat import sounds, videos
from api_server.chat.images import DETAILS, ImageSource, load_sources, url_source
from api_server.chat.videos import VideoSource
from api_server.dialects.sglang.batch import Batch, Item
from api_server.errors import invalid, unsupported
from api_server.web.endpoint import Call

# Beginnings of texts that are no bare base64.
_SCHEMES = ("http://", "https://", "data:")


async def with_media(call: Call, batch: Batch) -> Batch:
    """The batch with its media loaded, each path once. Raises RequestFailed."""
    images = {path: item for each in batch.items for path, item in each.image_data}
    clips = {path: item for each in batch.items for path, item in each.video_data}
    heard = {path: item for each in batch.items for path, item in each.audio_data}
    if not images and not clips and not heard:
        return batch
    most = call.server.settings.limit_images
    named = (("image_data", "images", images), ("video_data", "videos", clips), ("audio_data", "sounds", heard))
    for name, what, given in named:
        if given:
            _check(call, batch, name)
            check_count(len(given), what, name, most)
    image_sources = [_image(item, path) for path, item in images.items()]
    video_sources = [_video(item, path) for path, item in clips.items()]
    loaded = dict(zip(images, await load_sources(call.server, image_sources, "image_data"), strict=True))
    read = await videos.load_sources(call.server, video_sources, "video_data")
    loaded_clips = dict(zip(clips, read, strict=True))
    sound_sources = [_sound(item, path) for path, item in heard.items()]
    loaded_sounds = dict(zip(heard, await sounds.load_sources(call.server, sound_sources, "audio_data"), strict=True))

    def seeing(item: Item) -> Item:
        return replace(
            item,
            sounds=[loaded_sounds[path] for path, _ in item.audio_data],
            images=[loaded[path] for path, _ in item.image_data],
            videos=[loaded_clips[path] for path, _ in item.video_data],
        )

    return replace(batch, items=[seeing(item) for item in batch.items])


def _check(call: Call, batch: Batch, name: str) -> None:
    takes = call.server.listens if name == "audio_data" else call.server.sees
    if not takes:
        raise unsupported(name, "a value")
    if any(isinstance(each.prompt, np.ndarray) for each in batch.items):
        raise invalid(f"{name} and input_embeds exclude each other: give text or input_ids", name)


def _image(given: Any, path: str) -> ImageSource:
    detail = "auto"
    if isinstance(given, Mapping):
        detail = given.get("detail") or "auto"
        if detail not in DETAILS:
            raise invalid(f"{path}.detail must be one of {', '.join(DETAILS)}, got {detail!r:.60}", f"{path}.detail")
        given = given.get("url")
    if not isinstance(given, str):
        raise invalid(f"{path} must be a URL, a data URI or base64, got {given!r:.60}", path)
    if given.lower().startswith(_SCHEMES):
        return replace(url_source(given, path), detail=detail)
    return ImageSource(path, "base64", given, detail)


def _sound(given: Any, path: str) -> ImageSource:
    if isinstance(given, Mapping):
        given = given.get("url")
    if not isinstance(given, str):
        raise invalid(f"{path} must be a URL, a data URI or base64, got {given!r:.60}", path)
    return sounds.source_of(given, path)


def _video(given: Any, path: str) -> VideoSource:
    if not isinstance(given, Mapping):
        return videos.read_source(given, path, {}, bare_base64=True)
    content = given.get("frames", given.get("url"))
    return videos.read_source(content, path, given, bare_base64=True)
