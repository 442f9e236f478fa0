"""One form of an address, whatever a socket or a header shows."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from shared.addresses import LOOPBACK_NETWORKS, canonical, is_loopback, only_loopback


@pytest.mark.parametrize(
    ("shown", "meant"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::FFFF:7f00:1", "127.0.0.1"),
        ("0:0:0:0:0:ffff:10.0.0.1", "10.0.0.1"),
        ("0::1", "::1"),
        ("fe80::1%eth0", "fe80::1"),
    ],
)
def test_an_address_has_one_form(shown: str, meant: str) -> None:
    assert canonical(shown) == ip_address(meant)


@pytest.mark.parametrize("text", ["", "localhost", "127.1", "127.0.0.1:80", "[::1]", "unknown", " 127.0.0.1"])
def test_what_is_no_address_has_none_and_is_not_local(text: str) -> None:
    assert canonical(text) is None
    assert not is_loopback(text)


def test_what_is_local() -> None:
    local = ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"]
    assert all(map(is_loopback, local))
    assert not any(map(is_loopback, ["10.0.0.1", "::ffff:10.0.0.1", "0.0.0.0", "::", "fe80::1", "128.0.0.1"]))
    networks = list(map(ip_network, LOOPBACK_NETWORKS))
    assert all(any(ip_address(address) in network for network in networks) for address in local)


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("no.such.host", False),
    ],
)
def test_who_can_reach_a_listener(host: str, alone: bool) -> None:
    assert only_loopback(host) is alone
