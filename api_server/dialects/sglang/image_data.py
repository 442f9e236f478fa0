"""Loads the images of SGLang's `image_data`: URLs, data URIs and bare base64, and no file of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from api_server.body.item_limits import check_count
from api_server.chat.images import DETAILS, ImageSource, load_sources, url_source
from api_server.dialects.sglang.batch import Batch, Item
from api_server.dialects.sglang.schema import GenerateRequest
from api_server.errors import invalid, unsupported
from api_server.web.endpoint import Call

# Beginnings of texts that are no bare base64.
_SCHEMES = ("http://", "https://", "data:")


async def with_images(call: Call, body: GenerateRequest, batch: Batch) -> Batch:
    """The batch with its images loaded, each path once. Raises RequestFailed."""
    given = {path: item for each in batch.items for path, item in each.image_data}
    if not given:
        return batch
    if not call.server.sees:
        raise unsupported("image_data", "a value")
    if body.session_params is not None:
        raise invalid("image_data and session_params exclude each other: a session keeps no images", "image_data")
    if any(isinstance(each.prompt, np.ndarray) for each in batch.items):
        raise invalid("image_data and input_embeds exclude each other: give text or input_ids", "image_data")
    check_count(len(given), "images", "image_data", call.server.settings.limit_images)
    sources = [_source(item, path) for path, item in given.items()]
    loaded = dict(zip(given, await load_sources(call.server, sources, "image_data"), strict=True))

    def seeing(item: Item) -> Item:
        return replace(item, images=[loaded[path] for path, _ in item.image_data])

    return replace(batch, items=[seeing(item) for item in batch.items])


def _source(given: Any, path: str) -> ImageSource:
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
