"""Who may give orders that touch other clients' requests: for now only callers on this host.

The address is the peer's, or what a proxy on this host says of its own peer in X-Forwarded-For (uvicorn reads it from
loopback peers only). A proxy on this host that does not say it makes everybody local.
"""

from __future__ import annotations

from functools import wraps
from ipaddress import ip_address

from starlette.responses import Response

from api_server.endpoint import Call, Handler
from api_server.errors import ErrorKind, RequestFailed


def local_only(handler: Handler) -> Handler:
    """The handler, refused to callers from elsewhere."""

    @wraps(handler)
    async def guarded(call: Call) -> Response:
        peer = call.scope.get("client")
        if peer is None or not is_loopback(peer[0]):
            where = peer[0] if peer else "an unknown address"
            raise RequestFailed(
                ErrorKind.FORBIDDEN, f"{call.path} is for callers on the server's own host; you are at {where}"
            )
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
