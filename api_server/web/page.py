"""The page at /ui/: the files of its bundle, with the headers that keep a browser from anything else.

The bundle in `page_files/` is built from the folder `ui/` (`make ui`). Each file stands there as it is and gzipped.
Names of scripts and styles have a hash of the content, so browsers may keep them for ever. Knows nothing of what the
page does.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

ROOT = "/ui/"
FOLDER = Path(__file__).parent / "page_files"

_INDEX_NAME = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Images of a conversation are data URLs, and those that a user chooses are blobs until they are read; so is speech.
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify tokenyard"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "vary": "Accept-Encoding",
}


@dataclass(frozen=True)
class _File:
    """One file of the bundle. `zipped` is its gzip form."""

    content: bytes
    zipped: bytes
    media_type: str
    tag: str
    # True when another content gets another name.
    lasting: bool


def paths() -> frozenset[str]:
    """The paths of the page, which need no key: the page itself asks for one."""
    return frozenset({ROOT.rstrip("/"), ROOT, *(ROOT + name for name in _files() if name != _INDEX_NAME)})


def routes() -> list[BaseRoute]:
    """Routes of the page and its files."""
    return [
        Route(ROOT.rstrip("/"), _to_root, methods=["GET"]),
        Route(ROOT, _index, methods=["GET"]),
        Route(ROOT + "{name}", _asset, methods=["GET"]),
    ]


def prefers_html(accept: str) -> bool:
    """True for a browser that opens a page: it names text/html, and before anything else."""
    return accept.partition(",")[0].partition(";")[0].strip().lower() in ("text/html", "application/xhtml+xml")


@cache
def _files() -> dict[str, _File]:
    """Reads the bundle, by name."""
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES}


def _read(path: Path) -> _File:
    content = path.read_bytes()
    zipped = path.with_name(path.name + ".gz")
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    lasting = path.name != _INDEX_NAME and path.suffix in (".js", ".css")
    media_type = _MEDIA_TYPES[path.suffix]
    return _File(content, zipped.read_bytes() if zipped.is_file() else gzip.compress(content), media_type, tag, lasting)


async def _to_root(_: Request) -> Response:
    return RedirectResponse(ROOT, 308)


async def _index(request: Request) -> Response:
    return _answer(request, _files()[_INDEX_NAME])


async def _asset(request: Request) -> Response:
    found = _files().get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    return _answer(request, found)


def _answer(request: Request, file: _File) -> Response:
    headers = _HEADERS | {
        "etag": file.tag,
        "cache-control": "public, max-age=31536000, immutable" if file.lasting else "no-cache",
    }
    # Weak tags come from proxies that code a response anew.
    if file.tag in request.headers.get("if-none-match", "").replace("W/", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.zipped, headers=headers | {"content-encoding": "gzip"}, media_type=file.media_type)
    return Response(file.content, headers=headers, media_type=file.media_type)
