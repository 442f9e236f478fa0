"""Which addresses are public, against IANA's tables; and what a list of hosts opens."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.fetch_hosts import FetchHosts, is_public

SPECIAL_V4 = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
]  # fmt: skip
"""IANA's registry of special-purpose IPv4 addresses that are not globally reachable, and multicast."""
SPECIAL_V6 = [
    "::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/32", "2001:2::/48", "2001:10::/28",
    "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
]  # fmt: skip
v4 = st.ip_addresses(v=4)


def inside(network: str) -> st.SearchStrategy[IPv4Address | IPv6Address]:
    return st.ip_addresses(network=network)


@given(st.sampled_from(SPECIAL_V4 + SPECIAL_V6).flatmap(inside))
def test_no_special_address_is_public(address: IPv4Address | IPv6Address) -> None:
    assert not is_public(address)


@given(v4)
def test_the_other_ipv4_addresses_are_public(address: IPv4Address) -> None:
    special = any(address in ip_network(network) for network in SPECIAL_V4)
    assert is_public(address) == (not special)


@given(st.sampled_from(["2600::/12", "2a00::/12", "2400::/12", "2001:4860::/32"]).flatmap(inside))
def test_ipv6_addresses_of_the_internet_are_public(address: IPv6Address) -> None:
    assert is_public(address)
    assert not is_public(IPv6Address(f"{address}%1"))


@given(v4)
def test_no_ipv6_form_of_an_ipv4_address_is_public(address: IPv4Address) -> None:
    bits = int(address)
    mapped, compatible = ip_address(f"::ffff:{address}"), ip_address(f"::{address}")
    translated, relayed = ip_address(f"64:ff9b::{address}"), IPv6Address((0x2002 << 112) | (bits << 80))
    tunnelled = IPv6Address((0x20010000 << 96) | (bits ^ 0xFFFFFFFF))
    assert isinstance(relayed.sixtofour, IPv4Address)
    assert tunnelled.teredo is not None
    assert tunnelled.teredo[1] == address
    for form in (mapped, compatible, translated, relayed, tunnelled):
        assert not is_public(form)


def test_a_name_leads_to_public_addresses_only() -> None:
    hosts = FetchHosts.parse("Docs.Example.com, *.corp.example , localhost,")
    assert [hosts.lists(host) for host in ("docs.example.com", "docs.example.com.", "a.b.corp.example")] == [True] * 3
    for stranger in (
        "example.com",
        "corp.example",
        "xcorp.example",
        "docs.example.com.evil.example",
        "8.8.8.8",
        "",
        "::1",
    ):
        assert not hosts.lists(stranger)
    assert hosts.opens(ip_address("8.8.8.8"))
    assert not hosts.opens(ip_address("127.0.0.1"))


def test_an_address_opens_itself() -> None:
    hosts = FetchHosts.parse("10.1.0.0/16,127.0.0.1,fd00::/8,wiki")
    for inside in ("10.1.2.3", "127.0.0.1", "fd12::1"):
        assert hosts.lists(inside)
        assert hosts.opens(ip_address(inside))
    for outside in ("10.2.0.1", "127.0.0.2", "fe80::1", "::ffff:10.1.2.3", "::ffff:127.0.0.1", "fd12::1%1"):
        assert not hosts.lists(outside)
        assert not hosts.opens(ip_address(outside))
    assert not hosts.lists("8.8.8.8")


def test_nothing_listed_is_nothing_open() -> None:
    hosts = FetchHosts.parse(" , ")
    assert not hosts
    assert not hosts.lists("example.com")


@pytest.mark.parametrize(
    "entry",
    ["*", "*.", "*.1", "a.*.b", "a..b", "-a.de", "http://a.de", "a.de/x", "a.de:80", "10.0.0.1/8", "1.2.3", "0x7f.1",
     "127.0x1", "2130706433", "[::1]", "bücher.de", "a b", "x" * 64],
)  # fmt: skip
def test_what_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError) as caught:
        FetchHosts.parse(f"a.example,{entry}")
    assert str(caught.value) == entry


@given(st.lists(st.ip_addresses().map(str), max_size=4))
def test_a_list_of_addresses_holds_these(addresses: list[str]) -> None:
    hosts = FetchHosts.parse(",".join(addresses))
    assert all(hosts.opens(ipaddress.ip_address(address)) for address in addresses)
