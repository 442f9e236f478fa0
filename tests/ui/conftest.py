"""One browser for the tests of each file, the server of the embedded model for all of them, and the page's source."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.server import Server

# The same as in ui/package.json.
OLDEST_NODE = 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.ui.browser import chromium

    # Ended with its file: while it runs, no test of another file can run an event loop.
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, embedded: Server) -> Iterator[Any]:
    from tests.ui.browser import Visit

    visit = Visit.begin(browser, embedded.url)
    yield visit
    visit.end()


def problem_of(npm: str | None, node: str | None) -> str:
    """Why these programs cannot build the page; an empty text if they can."""
    if npm is None or node is None:
        return "npm or node is not installed"
    done = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False)
    version = done.stdout.strip()
    found = re.match(r"v(\d+)\.", version)
    if found is None or int(found[1]) < OLDEST_NODE:
        return f"node {OLDEST_NODE} or newer is needed, {node} is {version or 'broken'}"
    return ""


def run_script(source: Path, script: str) -> str:
    """What a module in the page's source folder writes; its failure is this test's."""
    command = ["node", "--input-type=module", "--eval", script]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder ui/ with its packages from npm."""
    problem = problem_of(shutil.which("npm"), shutil.which("node"))
    if problem:
        pytest.skip(f"{problem}: the page cannot be built")
    copy = tmp_path_factory.mktemp("page") / "ui"
    shutil.copytree(Path(__file__).parents[2] / "ui", copy, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install the page's packages: {done.stderr[-300:]}")
    return copy
