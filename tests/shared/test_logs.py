"""One log format for all processes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from shared import logs


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
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    scheduler: batch of 3\n", capsys.readouterr().err)


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
