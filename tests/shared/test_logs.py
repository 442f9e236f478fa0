"""One log format for all processes."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator

import pytest

from shared import logs

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_has_time_level_role_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.configure("scheduler", "info")
    log.info("batch of %d", 3)
    log.debug("unseen")
    assert re.fullmatch(TIME + r" INFO    scheduler: batch of 3\n", capsys.readouterr().err)


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.configure("scheduler", "info", "json")
    log.info("lines\nand \u2028 \ud800 %s", "é", extra={"facts": {"status": 200}})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(TIME, first.pop("time"))
    message = "lines\nand \u2028 \ud800 é"
    assert first == {"level": "info", "role": "scheduler", "message": message, "status": 200}
    assert (second["level"], second["message"]) == ("error", "it failed")
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("ValueError: broken")


def test_times_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        assert logs.utc(1_790_000_000.0625) == "2026-09-21T14:13:20.062Z"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\x1b[2J", "\0"])
def test_nothing_ends_a_line_or_moves_the_cursor(capsys: pytest.CaptureFixture[str], end: str) -> None:
    logs.configure("one", "info").info("path /a%s2026 ERROR two: forged", end, extra={"facts": {"path": end}})
    written = capsys.readouterr().err
    assert len(written.splitlines()) == 1
    assert end not in written.removesuffix("\n")


def test_a_text_line_names_a_request_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.configure("one", "info")
    with logs.about("mine", "abc"):
        log.info("request mine failed")
        log.info("access", extra={"facts": {"request_id": "mine"}})
    log.info("hello")
    ends = [line.partition("one: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert ends == ["request mine failed trace_id=abc", "access request_id=mine trace_id=abc", "hello"]


def test_a_request_is_named_in_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    token = logs.of_request.set({"request_id": "mine", "trace_id": "abc"})
    try:
        logs.configure("one", "info").info("hello")
        logs.configure("one", "info", "json").info("hello")
    finally:
        logs.of_request.reset(token)
    text, record = capsys.readouterr().err.splitlines()
    assert text.endswith("one: hello request_id=mine trace_id=abc")
    assert json.loads(record)["request_id"] == "mine"


@pytest.mark.parametrize("form", logs.FORMATS)
def test_trouble_is_found_in_what_another_process_has_written(form: str) -> None:
    def written(level: str, **facts: str) -> str:
        return logs.line(form, 0.0, level, "worker", "out of blocks", facts)

    assert "out of blocks" in logs.trouble_in(written("ERROR"))
    assert not any(logs.trouble_in(written(level)) for level in ("DEBUG", "INFO", "WARNING"))
    assert logs.trouble_in(" Fatal Python error: Aborted ") == "Fatal Python error: Aborted"
    assert logs.trouble_in('{"time": cut') == '{"time": cut'
    assert logs.is_record(written("INFO")) == (form == "json")
    if form == "json":
        found = logs.trouble_in(written("ERROR", exception="Traceback\nValueError: x"))
        assert found == "ERROR out of blocks: ValueError: x"


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("one", "info")
    logs.configure("two", "debug").debug("once")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("two: once")


@pytest.mark.parametrize("library", ["httpx", "httpx2", "httpcore2.connection"])
def test_chatty_libraries_are_quiet_and_ours_are_not(capsys: pytest.CaptureFixture[str], library: str) -> None:
    logs.configure("api_server:0", "debug")
    logging.getLogger(library).info("HTTP request")
    logging.getLogger(library).warning("pool is full")
    assert "HTTP request" not in (err := capsys.readouterr().err)
    assert "pool is full" in err
