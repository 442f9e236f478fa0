"""Web pages as callers: the origins that a browser lets read this server's answers (CORS).

A page in a browser on this host or in this network reaches addresses that its author does not. CORS decides which
pages may read answers and send JSON. It does not keep a page from sending what a form can send; so a body without a
content type is not accepted from a page (`endpoint.py`), and operators' routes refuse pages (`access.py`).
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

PAGES_OF_THIS_HOST = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"

# Headers of answers that a page could not read otherwise.
EXPOSED_HEADERS = (
    *(f"x-ratelimit-{fact}-{kind}" for kind in ("requests", "tokens") for fact in ("limit", "remaining", "reset")),
    *("x-request-id", "request-id", "retry-after", "www-authenticate"),
    *("x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time", "x-validation-time"),
    *("x-queue-time", "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens"),
)


def allow_pages(app: ASGIApp, origins: str, public_paths: frozenset[str], has_keys: bool) -> ASGIApp:
    """Adds the headers that the setting `cors_origins` asks for. Preflights end here: they never have a key.

    By default a server with keys is open to pages from everywhere, because a page needs a key like any other caller.
    Answers that need no key are open to pages of this host only.
    """
    if origins == "none":
        return app
    if origins != "auto":
        return _ForPages(app, _cors(app, [origin.strip() for origin in origins.split(",")]))
    local = _cors(app, regex=PAGES_OF_THIS_HOST)
    return _ForPages(app, _cors(app, ["*"]) if has_keys else local, public_paths, local)


class _ForPages:
    """Sends requests with an Origin through the middleware of their path. Others skip it, which saves time."""

    def __init__(
        self, app: ASGIApp, cors: ASGIApp, public: frozenset[str] = frozenset(), public_cors: ASGIApp | None = None
    ) -> None:
        self._app = app
        self._cors = cors
        self._public_cors = dict.fromkeys(public, public_cors or cors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"origin" for name, _ in scope["headers"]):
            await self._public_cors.get(scope["path"], self._cors)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _cors(app: ASGIApp, origins: list[str] | None = None, regex: str | None = None) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=origins or (),
        allow_origin_regex=regex,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
    )
