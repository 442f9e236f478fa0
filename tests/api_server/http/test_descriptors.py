"""More connections than this process can hold."""

from __future__ import annotations

import logging

import pytest

from api_server.http import descriptors
from tests.api_server.conftest import LiveServer
from tests.api_server.http.conftest import Line, request

PING = request("/ping", b"", method="GET")


def test_more_connections_than_descriptors_are_answered_and_logged(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "most_connections", lambda: 2)
    monkeypatch.setattr(descriptors, "_last_line", -descriptors.QUIET_SECONDS)
    with caplog.at_level(logging.WARNING):
        lines = [Line(server) for _ in range(4)]
        for served in lines[:2]:
            served.send(PING)
            assert served.answer().status == 200
        for turned_away in lines[2:]:
            assert turned_away.answer().status == 503
            assert turned_away.ended
    assert len([r for r in caplog.records if "no more can be held" in r.getMessage()]) == 1
    for line in lines:
        line.close()


def test_some_descriptors_are_kept_back() -> None:
    descriptors.most_connections.cache_clear()
    assert descriptors.most_connections() > 100
    assert not descriptors.are_short(1)
