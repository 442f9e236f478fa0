"""Who may do what: API keys for every route but the public ones, and the operator's routes.

The operator's routes touch other clients' requests. With an admin key they want it; without one they answer callers on
this host. A caller's address is the peer's, or what a proxy on this host says of its own peer in X-Forwarded-For
(uvicorn reads it from loopback peers only). A proxy on this host that does not say it makes everybody local.
"""

from __future__ import annotations

from functools import wraps
from ipaddress import ip_address

from starlette.responses import Response
from starlette.types import Scope

from api_server.endpoint import Call, Handler
from api_server.errors import ErrorKind, RequestFailed
from shared.access_keys import AccessKeys, Caller

PUBLIC_PATHS = frozenset(
    {"/health", "/ping", "/health_generate", "/ready", "/metrics", "/docs", "/openapi.json", "/api-doc/openapi.json"}
)
"""For load balancers, orchestrators, Prometheus, and for those who want to learn how to ask. They tell no secret."""


def identify(keys: AccessKeys, scope: Scope) -> Caller:
    """Who makes this request. Raises RequestFailed(UNAUTHORIZED)."""
    given = _presented(scope)
    caller = keys.caller(given)
    if caller is not None:
        return caller
    if scope["path"] in PUBLIC_PATHS or (scope["path"] == "/" and scope["method"] in ("GET", "HEAD")):
        return Caller()
    problem = "no API key was given" if given is None else "the API key is not one of this server's"
    raise RequestFailed(
        ErrorKind.UNAUTHORIZED, f"{problem}; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    )


def operators_only(handler: Handler) -> Handler:
    """The handler, refused to callers who do not run this server."""

    @wraps(handler)
    async def guarded(call: Call) -> Response:
        _require_operator(call)
        return await handler(call)

    return guarded


def is_loopback(address: str) -> bool:
    """Also in IPv6's form of IPv4 addresses; what is no address is not local."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _require_operator(call: Call) -> None:
    if call.server.keys.admins:
        if not call.caller.admin:
            raise RequestFailed(ErrorKind.FORBIDDEN, f"{call.path} needs the server's admin key")
        return
    peer = call.scope.get("client")
    if peer is None or not is_loopback(peer[0]):
        where = peer[0] if peer else "an unknown address"
        raise RequestFailed(
            ErrorKind.FORBIDDEN, f"{call.path} is for callers on the server's own host; you are at {where}"
        )


def _presented(scope: Scope) -> str | None:
    """The key in a request's headers. Anthropic's clients use the second form, all others the first."""
    found: dict[bytes, str] = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
    scheme, _, key = found.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return found.get(b"x-api-key")


_HEADERS = (b"authorization", b"x-api-key")
