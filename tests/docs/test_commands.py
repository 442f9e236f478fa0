"""Commands in README.md and docs/ are such that they can be run: flags exist, paths are routes, bodies are JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy import cli
from tests.docs.pages import PAGES, commands, is_path, name_of

WITH_COMMANDS = [page for page in PAGES if commands(page.read_text())]


def of_program(page: Path, program: str) -> list[list[str]]:
    return [words[1:] for words in commands(page.read_text()) if words[0].endswith(program)]


def status_of(words: list[str]) -> object:
    """The exit status of reading a command line: 0 where it is one, or asks for help."""
    try:
        cli.read(words)
    except SystemExit as end:
        return end.code
    return 0


def test_the_commands_are_found() -> None:
    assert sum(len(of_program(page, "tokenyard")) for page in PAGES) > 20
    assert sum(len(of_program(page, "curl")) for page in PAGES) > 20


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_command_line_takes_them(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in of_program(page, "tokenyard"):
        assert status_of(words) == 0, f"tokenyard {' '.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_what_curl_asks_is_a_route_and_what_it_sends_is_json(page: Path) -> None:
    for words in of_program(page, "curl"):
        (url,) = (word for word in words if word.startswith(("http://", "https://", "localhost:")))
        path = urlsplit(url if "://" in url else f"http://{url}").path
        assert is_path(path), url
        body = next((after for word, after in pairwise(words) if word in ("-d", "--data")), None)
        assert body is None or json.loads(body), url
