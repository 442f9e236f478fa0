"""More connections than this process can hold."""

from __future__ import annotations

import logging
import re

import pytest

from api_server.http import descriptors
from tests.api_server.conftest import LiveServer
from tests.api_server.http.conftest import Line, request

PING = request("/ping", b"", method="GET")


def refused(line: Line) -> float:
    """What /metrics says of refused connections."""
    line.send(request("/metrics", b"", method="GET"))
    text = line.answer().body.decode()
    found = re.search(r"^tokenyard_connections_refused_total ([0-9.]+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_more_connections_than_descriptors_are_answered_and_logged(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "most_connections", lambda: 2)
    monkeypatch.setattr(descriptors, "_last_line", -descriptors.QUIET_SECONDS)
    with caplog.at_level(logging.WARNING):
        first = Line(server)
        before = refused(first)
        lines = [first, *(Line(server) for _ in range(3))]
        for served in lines[:2]:
            served.send(PING)
            assert served.answer().status == 200
        for turned_away in lines[2:]:
            assert turned_away.answer().status == 503
            assert turned_away.ended
    assert len([r for r in caplog.records if "no more can be held" in r.getMessage()]) == 1
    assert refused(lines[0]) == before + 2
    for line in lines:
        line.close()


def test_some_descriptors_are_kept_back() -> None:
    descriptors.most_connections.cache_clear()
    assert descriptors.most_connections() > 100
    assert not descriptors.are_short(1)
