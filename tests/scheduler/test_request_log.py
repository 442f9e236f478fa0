"""The decision log: bounded, and still the whole story of a recent request."""

from __future__ import annotations

from scheduler.request_log import MOST_ENTRIES, MOST_INCIDENTS, MOST_REQUESTS, Journal


def test_a_request_is_found_by_how_its_id_begins() -> None:
    journal = Journal()
    journal.note("abc-1", "queued")
    journal.note("abd", "queued")
    journal.note("abc-1", "admitted")
    assert [line.split(" ", 2)[2] for line in journal.of("abc")] == ["queued", "admitted"]
    assert len(journal.of("ab")) == 3
    assert journal.of("x") == []


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    journal = Journal()
    for i in range(1000):
        journal.note("a", f"event {i}.")
    told = journal.of("a")
    assert len(told) == MOST_ENTRIES + 1
    assert told[0].endswith("event 0.")
    assert told[-1].endswith("event 999.")
    assert told[MOST_ENTRIES // 2].endswith(f"... {1000 - MOST_ENTRIES} more")


def test_the_oldest_requests_and_incidents_are_forgotten() -> None:
    journal = Journal()
    for i in range(MOST_REQUESTS + 10):
        journal.note(f"r{i:06}", "queued")
        journal.incident(f"crash {i}")
    assert journal.of("r000009") == []
    assert len(journal.of("r")) == MOST_REQUESTS
    assert len(journal.incidents) == MOST_INCIDENTS
    assert journal.incidents[-1].endswith(f"crash {MOST_REQUESTS + 9}")
