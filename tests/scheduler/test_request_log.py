"""The decision log: bounded, and still the whole story of a recent request."""

from __future__ import annotations

from scheduler.request_log import MAX_ENTRIES, MAX_EVENTS, MAX_REQUESTS, RequestLog


def test_a_request_is_found_by_how_its_id_begins() -> None:
    request_log = RequestLog()
    request_log.record("abc-1", "queued")
    request_log.record("abd", "queued")
    request_log.record("abc-1", "admitted")
    assert [line.split(" ", 2)[2] for line in request_log.of("abc")] == ["queued", "admitted"]
    assert len(request_log.of("ab")) == 3
    assert request_log.of("x") == []


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    request_log = RequestLog()
    for i in range(1000):
        request_log.record("a", f"event {i}.")
    lines = request_log.of("a")
    assert len(lines) == MAX_ENTRIES + 1
    assert lines[0].endswith("event 0.")
    assert lines[-1].endswith("event 999.")
    assert lines[MAX_ENTRIES // 2].endswith(f"... {1000 - MAX_ENTRIES} more")


def test_the_oldest_requests_and_incidents_are_forgotten() -> None:
    request_log = RequestLog()
    for i in range(MAX_REQUESTS + 10):
        request_log.record(f"r{i:06}", "queued")
        request_log.record_event(f"crash {i}")
    assert request_log.of("r000009") == []
    assert len(request_log.of("r")) == MAX_REQUESTS
    assert len(request_log.events) == MAX_EVENTS
    assert request_log.events[-1].endswith(f"crash {MAX_REQUESTS + 9}")
