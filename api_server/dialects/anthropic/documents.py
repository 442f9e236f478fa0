"""Anthropic's blocks of type document and image, and their fields that this server refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api_server.chat.documents import Document, text_field
from api_server.chat.images import ImageSource, url_source
from api_server.errors import ErrorKind, RequestFailed, invalid, unsupported


def document_block(block: Mapping[str, Any], path: str) -> Document | None:
    """The document of a block, or None for another block. Raises RequestFailed."""
    if block.get("type") != "document":
        return None
    source = block.get("source")
    citations = block.get("citations")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        raise unsupported(f"{path}.citations", "citing places of a document")
    if not isinstance(source, Mapping):
        raise invalid(f"{path}.source must be an object with type and data or url", f"{path}.source")
    name = text_field(block, "title", path)
    context = text_field(block, "context", path)
    return _document(source, f"{path}.source", name, context)


def image_block(block: Mapping[str, Any], path: str) -> ImageSource | None:
    """The image of a block, or None for another block. Raises RequestFailed."""
    if block.get("type") != "image":
        return None
    source = block.get("source")
    if not isinstance(source, Mapping):
        raise invalid(f"{path}.source must be an object with type and data or url", f"{path}.source")
    kind = source.get("type")
    if kind not in ("base64", "url"):
        where = f"{path}.source.type"
        message = f"{where}: a source of type {kind!r:.100} is not supported; send base64 or url"
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=where)
    field = f"{path}.source.{'url' if kind == 'url' else 'data'}"
    value = source.get("url" if kind == "url" else "data")
    if not isinstance(value, str):
        raise invalid(f"{field} must be a text", field)
    return url_source(value, field) if kind == "url" else ImageSource(field, "base64", value)


def _document(source: Mapping[str, Any], path: str, name: str, context: str) -> Document:
    kind = source.get("type")
    if kind not in ("text", "base64", "url"):
        where = f"{path}.type"
        message = f"{where}: a source of type {kind!r:.100} is not supported; send text, base64 or url"
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=where)
    key = "url" if kind == "url" else "data"
    if not isinstance(source.get(key), str):
        raise invalid(f"{path}.{key} must be a text", f"{path}.{key}")
    media_type = text_field(source, "media_type", path)
    return Document(f"{path}.{key}", kind, source[key], media_type, name, context)
