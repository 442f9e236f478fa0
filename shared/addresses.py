"""IP addresses in one canonical form, and the test for loopback."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from socket import SOCK_STREAM, gaierror, getaddrinfo

# Every form that a connection from this host can show, for libraries that compare as written.
LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1", "::ffff:127.0.0.0/104")


def canonical(address: str) -> IPv4Address | IPv6Address | None:
    """Parse an address; None if it is none. IPv4 in IPv6's form (from a socket on `::`) becomes IPv4, a zone is
    dropped."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback(address: str) -> bool:
    """Whether a host is a loopback address. False for text that is no address."""
    found = canonical(address)
    return found is not None and found.is_loopback


def only_loopback(host: str) -> bool:
    """Whether a server that listens on this name or address is reached from its own host alone."""
    try:
        found = {str(entry[4][0]) for entry in getaddrinfo(host, None, type=SOCK_STREAM)}
    except (gaierror, UnicodeError):
        return False
    return bool(found) and all(map(is_loopback, found))
