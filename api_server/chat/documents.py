"""Documents as parts of messages: the documents of every dialect become text parts, by one rule.

A document is sent as text, as base64 or by URL. It is text in UTF-8 (what models here read), and the model sees it as

    Document: report.txt
    Context: what Anthropic's clients may say about it

    the text

Each dialect has a `Reader` for its form of such parts. This module knows the replacement of a part and the limits;
`url_fetch.py` knows how a URL is fetched.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from api_server.chat.url_fetch import MOST_BYTES, UrlFetcher
from api_server.engine import scheduling
from api_server.errors import ErrorKind, RequestFailed, invalid

MOST_DOCUMENTS = 16
LONGEST_NAME = 200

_TEXT_TYPES = re.compile(
    r"text/.+"
    r"|application/(x-)?(json|jsonl|ndjson|xml|yaml|toml|javascript|ecmascript|typescript|python|sh|sql|graphql|tex|latex)"
    r"|application/.+\+(json|xml|yaml)",
    re.ASCII,
)
# Media types that leave the content open: then the bytes decide.
_UNSAID = ("", "application/octet-stream", "binary/octet-stream")
_CHARSETS = ("", "utf-8", "utf8", "us-ascii", "ascii")
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^";]*)', re.IGNORECASE)


@dataclass(frozen=True)
class Document:
    """The content of one document part. `field` is the path where the client wrote `value`."""

    field: str
    form: Literal["text", "base64", "url"]
    value: str
    # The declared media type, with parameters.
    media_type: str = ""
    name: str = ""
    context: str = ""


T = TypeVar("T")

# Returns the document of a part at a path, or None for another kind of part. Raises RequestFailed.
Reader = Callable[[Mapping[str, Any], str], Document | None]


async def load(fetcher: UrlFetcher | None, turns: Sequence[Any], path: str, reader: Reader) -> None:
    """Replaces every document in the turns' lists of parts by a text part, in place. Raises RequestFailed."""

    async def loaded(documents: Sequence[Document]) -> list[Any]:
        if len(documents) > MOST_DOCUMENTS:
            raise invalid(
                f"{path} has {len(documents)} documents; at most {MOST_DOCUMENTS} are possible in one request: send "
                "fewer, or several as one",
                path,
            )
        return [{"type": "text", "text": text} for text in await _texts(fetcher, documents)]

    await replace_parts(turns, path, reader, loaded)


async def replace_parts(
    turns: Sequence[Any],
    path: str,
    reader: Callable[[Mapping[str, Any], str], T | None],
    loaded: Callable[[Sequence[T]], Awaitable[Sequence[Any]]],
) -> None:
    """Replaces every part that `reader` finds in the turns' lists of parts by what `loaded` makes of it, in place."""
    found = [place for i, turn in enumerate(turns) for place in places(turn, f"{path}[{i}]", reader)]
    for (parts, i, _), part in zip(found, await loaded([source for *_, source in found]), strict=True):
        parts[i] = part


def file_part(part: Mapping[str, Any], path: str) -> Document | None:
    """OpenAI's part of a chat: `{"type": "file", "file": {...}}`."""
    if part.get("type") != "file":
        return None
    given = part.get("file")
    if not isinstance(given, Mapping):
        raise invalid(f"{path}.file must be an object with filename and file_data", f"{path}.file")
    return file_fields(given, f"{path}.file")


def file_fields(given: Mapping[str, Any], path: str) -> Document:
    """The document in OpenAI's fields: `file_data` (a data URL, or base64) or `file_url`, and `filename`."""
    if given.get("file_id") is not None:
        where = f"{path}.file_id"
        message = f"{where}: this server keeps no files: send the file itself as file_data"
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=where)
    data, url, name = (text_field(given, key, path) for key in ("file_data", "file_url", "filename"))
    if bool(data) == bool(url):
        raise invalid(f"{path} must have one of file_data and file_url", path)
    if url:
        return Document(f"{path}.file_url", "url", url, name=name)
    where = f"{path}.file_data"
    if not data.startswith("data:"):
        return Document(where, "base64", data, name=name)
    declared, comma, rest = data[len("data:") :].partition(",")
    if not comma or not declared.lower().endswith(";base64"):
        raise invalid(f'{where} must be base64, or "data:TYPE;base64," and base64, got {data!r:.60}', where)
    return Document(where, "base64", rest, declared[: -len(";base64")] or "text/plain", name)


def text_field(given: Mapping[str, Any], key: str, path: str) -> str:
    """The text of a field, empty if it is absent. Raises RequestFailed for another type."""
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{path}.{key} must be a text, got {value!r:.100}", f"{path}.{key}")
    return value or ""


def places(
    holder: Any, path: str, reader: Callable[[Mapping[str, Any], str], T | None]
) -> Iterator[tuple[list[Any], int, T]]:
    """Yields what `reader` finds among the parts of a turn or of a tool's result, with the list and the index of
    each."""
    for key in ("content", "output"):
        parts: Any = holder.get(key) if isinstance(holder, Mapping) else None
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            where = f"{path}.{key}[{i}]"
            found = reader(part, where) if isinstance(part, Mapping) else None
            if found is None:
                yield from places(part, where, reader)
            else:
                yield parts, i, found


async def _texts(fetcher: UrlFetcher | None, documents: Sequence[Document]) -> list[str]:
    """Loads all documents within the request's own time limit. The first failure cancels the rest."""
    if not documents:
        return []
    try:
        async with scheduling.spending(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(_text(fetcher, document)) for document in documents]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _text(fetcher: UrlFetcher | None, document: Document) -> str:
    field = document.field
    name = document.name
    if document.form == "text":
        _check_type(document.media_type, field)
        _check_size(len(document.value.encode()), field)
        return _shown(document, name, document.value)
    if document.form == "base64":
        _check_type(document.media_type, field)
        return _shown(document, name, _decoded(_bytes(document.value, field), field))
    if fetcher is None:
        message = f"{field}: this server fetches no URLs: send the document itself (its operator may set --fetch-hosts)"
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=field)
    fetched = await fetcher.fetch(document.value, field)
    _check_type(fetched.content_type, field)
    return _shown(document, name or fetched.name, _decoded(fetched.body, field))


def _shown(document: Document, name: str, text: str) -> str:
    """The text that the model sees. Names are one line of bounded length."""
    lines = [f"Document: {_line(name, LONGEST_NAME) or 'unnamed'}"]
    if document.context:
        lines.append(f"Context: {document.context.strip()}")
    return "\n".join([*lines, "", text])


def _line(text: str, longest: int) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:longest]


def _check_type(declared: str, field: str) -> None:
    media_type = declared.partition(";")[0].strip().lower()
    charset = _CHARSET.search(declared)
    if media_type not in _UNSAID and not _TEXT_TYPES.fullmatch(media_type):
        message = (
            f"{field}: a document of type {media_type[:100]!r} cannot be read here, only text (text/*, JSON, XML and "
            "the like): send the text that is in it"
        )
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=field)
    if charset is not None and charset[1].strip().lower() not in _CHARSETS:
        message = f"{field}: a document in {charset[1].strip()[:50]!r} cannot be read here: send it in UTF-8"
        raise RequestFailed(ErrorKind.UNSUPPORTED, message, field=field)


def _bytes(data: str, field: str) -> bytes:
    packed = "".join(data.split())
    _check_size(len(packed) // 4 * 3 - packed.count("="), field)
    try:
        return base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{field} is not valid base64: {error}", field) from None


def _check_size(size: int, field: str) -> None:
    if size > MOST_BYTES:
        raise invalid(f"{field} is a document of {size} bytes; at most {MOST_BYTES} are possible: send a part", field)


def _decoded(content: bytes, field: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(f"{field}: the document is no text in UTF-8 (byte {error.start}): send its text", field) from None
    if "\0" in text:
        raise invalid(f"{field}: the document is no text (it has zero bytes): send its text", field)
    return text
