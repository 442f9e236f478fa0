"""Access rules: API keys for every route but the public ones, and the operator's routes.

The operator's routes touch other clients' requests. With an admin key they require it. Without one they answer callers
on this host only. Where the host cannot be known they refuse every caller: see `_stranger`.
"""

from __future__ import annotations

from functools import wraps
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from api_server.errors import ErrorKind, RequestFailed
from api_server.web import page
from api_server.web.endpoint import Call, Handler
from shared.access_keys import AccessKeys, Caller
from shared.addresses import is_loopback
from shared.settings import Settings

# Paths for load balancers, orchestrators, Prometheus, and API documentation. They expose no secret.
PUBLIC_PATHS = frozenset(
    {
        *("/health", "/ping", "/health_generate", "/ready", "/v2/health/live", "/v2/health/ready"),
        *("/metrics", "/docs", "/openapi.json", "/api-doc/openapi.json"),
    }
)
METRICS_PATH = "/metrics"

_OF_PROXIES = frozenset(
    {
        "forwarded",
        "via",
        "x-real-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-original-forwarded-for",
        "true-client-ip",
        "cf-connecting-ip",
        "fastly-client-ip",
    }
)
# Headers that a proxy adds. A request that has one came from another host.
_OF_PROXIES_BEGIN = ("x-forwarded", "x-envoy-")


def public_paths(settings: Settings) -> frozenset[str]:
    """The paths of this server that need no key, beside its front page."""
    always = PUBLIC_PATHS - {METRICS_PATH} if settings.private_metrics else PUBLIC_PATHS
    return always | page.paths() if settings.ui else always


def identify(keys: AccessKeys, public: frozenset[str], scope: Scope) -> Caller:
    """Identifies the caller of a request. Raises RequestFailed(UNAUTHORIZED)."""
    given = _presented(scope)
    callers = [caller for key in (given or (None,)) if (caller := keys.caller(key))]
    if callers:
        return max(callers, key=lambda caller: caller.admin)
    if scope["path"] in public or (scope["path"] == "/" and scope["method"] in ("GET", "HEAD")):
        return Caller()
    problem = "no API key was given" if not given else "the API key is not one of this server's"
    raise RequestFailed(
        ErrorKind.UNAUTHORIZED,
        f"{problem}; send one as `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`",
    )


def operators_only(handler: Handler) -> Handler:
    """Wraps a handler so that it refuses callers who do not run this server."""

    @wraps(handler)
    async def guarded(call: Call) -> Response:
        _require_operator(call)
        return await handler(call)

    return guarded


def is_operator(call: Call) -> bool:
    """True for a caller whom the operator's routes serve."""
    return call.caller.admin if call.server.keys.admins else _stranger(call) is None


def _require_operator(call: Call) -> None:
    if call.server.keys.admins:
        if not call.caller.admin:
            raise RequestFailed(ErrorKind.FORBIDDEN, f"{call.path} needs the server's admin key")
        return
    reason = _stranger(call)
    if reason is not None:
        raise RequestFailed(
            ErrorKind.FORBIDDEN,
            f"{call.path} is for callers on the server's own host, but {reason}; start the server with "
            "--admin-api-key, and send that key",
        )


def _stranger(call: Call) -> str | None:
    """The reason why a caller without an admin key may not be on this host; None when it certainly is.

    Behind a proxy on this host every client has a loopback address. So only a server that listens on loopback alone has
    local callers at all, and only requests without any trace of a proxy are local. A page in a browser of this host
    counts as a stranger, too, unless it came from this server.
    """
    headers = call.headers
    peer = call.scope.get("client")
    if peer is None or not is_loopback(peer[0]):
        return f"you are at {peer[0] if peer else 'an unknown address'}"
    if not call.server.is_local:
        return f"it listens on {call.server.settings.host}, where others can reach it"
    proxied = next((name for name in headers if name in _OF_PROXIES or name.startswith(_OF_PROXIES_BEGIN)), None)
    if proxied is not None:
        return f"the request came through a proxy, which added {proxied}"
    if call.scope["http_version"] == "1.0":
        return "the request is HTTP/1.0, which is what nginx says to the servers behind it"
    return _foreign_page(headers, call.server.settings.host)


def _foreign_page(headers: Headers, own_host: str) -> str | None:
    host = headers.get("host", "")
    name = _place(f"//{host}").hostname or ""
    # Any name can be made to lead to 127.0.0.1, and a browser then takes the page of that name for ours.
    if not (name in (own_host.lower(), "localhost") or is_loopback(name)):
        return f"the Host header is {host[:100]!r}, which is no name of this host"
    origin = headers.get("origin")
    if origin is not None and _place(origin).netloc != host:
        return f"a web page of {origin[:100]!r} sends it"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "a web page of another site sends it"
    return None


def _place(url: str) -> SplitResult:
    """The parts of a URL; empty parts for a broken one."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _presented(scope: Scope) -> list[str]:
    """The keys in a request's headers. Some clients send a placeholder in one and the key in another."""
    found: list[bytes] = []
    for name, value in scope["headers"]:
        if name in _KEY_HEADERS:
            found.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            found.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return [key.decode("latin-1") for key in found[:_MOST_KEYS] if key]


# Key headers of Anthropic and Azure; all others send `Authorization: Bearer`.
_KEY_HEADERS = (b"x-api-key", b"api-key")
# Most keys of a request: each is hashed and compared.
_MOST_KEYS = 4
