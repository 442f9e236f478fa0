"""README.md and the pages in docs/, taken apart into commands and tables, and the names that they may use."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from api_server import app
from api_server.engine.client import EngineClient
from api_server.state import ServerState
from api_server.text.tokenizer import Tokenizer
from api_server.web import openapi
from deploy import cli
from deploy.embedded_model import EMBEDDED_MODEL_PATH
from shared.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    \S.*\n(?:^    .*\n|^\n(?=    \S))*)", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_COMMANDS = ("curl", "tokenyard", ".venv/bin/tokenyard")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_fences(text: str) -> str:
    return _FENCE.sub("", text)


def code_spans(text: str) -> list[str]:
    return _CODE.findall(text)


def commands(text: str) -> list[list[str]]:
    """The calls of curl and tokenyard in shell blocks, as lists of their words."""
    blocks = [block for kind, block in _FENCE.findall(text) if kind in ("", "sh")]
    blocks += [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in _INDENTED.findall(without_fences(text))]
    found = (words for block in blocks for words in _lines(block))
    return [words for words in found if words and words[0] in _COMMANDS]


def _lines(block: str) -> Iterator[list[str]]:
    """The words of each line; a line whose quotes are open, or that ends in a backslash, goes on in the next one."""
    begun = ""
    for line in block.splitlines():
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:
            begun += "\n"
            continue
        yield words
        begun = ""


@dataclass(frozen=True)
class Table:
    """The cells of a table in a page."""

    head: list[str]
    rows: list[list[str]]


def tables(text: str) -> list[Table]:
    found: list[list[list[str]]] = [[]]
    for line in without_fences(text).splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [Table(rows[0], rows[2:]) for rows in found if rows]


@cache
def serve_flags() -> frozenset[str]:
    return frozenset(flag for action in _parsers()["serve"]._actions for flag in action.option_strings)


@cache
def all_flags() -> frozenset[str]:
    """The flags of all subcommands."""
    parsers = _parsers().values()
    return frozenset(flag for parser in parsers for action in parser._actions for flag in action.option_strings)


def _parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


@cache
def paths() -> frozenset[str]:
    """The paths of the OpenAPI documents of models that generate, pool and hear."""
    settings = Settings(model=str(EMBEDDED_MODEL_PATH))
    engine = EngineClient("ipc:///nowhere", "docs")
    state = ServerState(settings, Tokenizer.load(settings.model), engine)
    routes = app.create(state).routes
    kinds = ((False, False), (True, False), (False, True))
    return frozenset(path for kind in kinds for path in openapi.document(routes, "0", *kind)["paths"])


def is_path(text: str) -> bool:
    """True if a route has this path; names in capitals and dots stand for any value."""
    return any(re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), text) for path in paths())
