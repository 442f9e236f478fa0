"""Which hosts an operator has opened for fetching URLs, and which addresses a fetch may connect to.

Knows names and addresses. Resolves nothing, knows no URL and opens no connection.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*", re.ASCII)
# A last label that resolvers read as (a part of) an IPv4 address.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)

# The range that the Internet uses. Outside of it are the forms that carry an IPv4 address (mapped, NAT64).
_UNICAST_V6 = IPv6Network("2000::/3")
_NOT_PUBLIC: tuple[IPv4Network | IPv6Network, ...] = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments, of which older Pythons know a part
    IPv4Network("192.88.99.0/24"),  # 6to4 relays
    IPv6Network("2001::/23"),  # protocol assignments, Teredo among them
    IPv6Network("2002::/16"),  # 6to4: an IPv4 address in it is where a packet ends
    IPv6Network("3fff::/20"),  # documentation
)


@dataclass(frozen=True)
class FetchHosts:
    """The hosts of `--fetch-hosts`; empty: nothing may be fetched."""

    names: frozenset[str] = frozenset()
    # Domain suffixes, each with its leading dot.
    suffixes: tuple[str, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FetchHosts:
        """Parse the setting. ValueError names the entry."""
        names = set()
        suffixes = []
        networks = []
        for entry in filter(None, (part.strip().lower() for part in text.split(","))):
            name = entry.removeprefix("*.")
            if _is_name(name):
                if name == entry:
                    names.add(name)
                else:
                    suffixes.append(f".{name}")
                continue
            try:
                networks.append(ipaddress.ip_network(entry))
            except ValueError:
                raise ValueError(entry) from None
        return cls(frozenset(names), tuple(suffixes), tuple(networks))

    def __bool__(self) -> bool:
        return bool(self.names or self.suffixes or self.networks)

    def lists(self, host: str) -> bool:
        """Whether a URL may name this host (in lower case). A literal address must be listed, public or not."""
        try:
            return self._holds(ipaddress.ip_address(host))
        except ValueError:
            name = host.removesuffix(".")
            return name in self.names or name.endswith(self.suffixes)

    def opens(self, address: Address) -> bool:
        """Whether a listed host may turn out to be at this address: a public one, or one that is listed itself."""
        return self._holds(address) or is_public(address)

    def _holds(self, address: Address) -> bool:
        # An address with a zone (fe80::1%eth0) means another host on each machine.
        return getattr(address, "scope_id", None) is None and any(address in network for network in self.networks)


def is_public(address: Address) -> bool:
    """Whether this is a host of the Internet: no private, local, shared, reserved or multicast address, nor one of
    the IPv6 forms that lead to an IPv4 address."""
    if address.is_multicast or not address.is_global or any(address in network for network in _NOT_PUBLIC):
        return False
    return isinstance(address, IPv4Address) or (address.scope_id is None and address in _UNICAST_V6)


def _is_name(text: str) -> bool:
    return len(text) <= 253 and bool(_NAME.fullmatch(text)) and not _NUMBER.fullmatch(text.rpartition(".")[2])
