"""The page at /ui/ before two API processes: figures of both, and an answer whose API process is killed."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.server import Server

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'tokenyard[test]'")

from playwright.sync_api import expect

from tests.ui.browser import MILLISECONDS, Visit, needs_chromium

pytestmark = needs_chromium
expect.set_options(timeout=MILLISECONDS)

LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
# The sum of the column of answers' tokens.
SUM = """() => [...document.querySelectorAll(".replicas tbody tr")]
    .reduce((sum, row) => sum + Number(row.cells[3].textContent), 0)"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(None, ["--api-servers", "2"], tmp_path_factory.mktemp("replicas") / "log") as running:
        yield running


@pytest.fixture
def visit_of_two(browser: Any, server: Server) -> Iterator[Visit]:
    visit = Visit.begin(browser, server.url)
    yield visit
    # The console names the connection that broke.
    visit.problems = [problem for problem in visit.problems if "net::ERR_" not in problem]
    visit.end()


def replica_that_answers(server: Server) -> psutil.Process:
    """The API process with the running request; a new connection reaches either."""
    found: list[str] = []

    def look() -> bool:
        with urllib.request.urlopen(f"{server.url}/live/requests", timeout=60) as response:
            shown = json.load(response)
        if any(row["state"] == "running" for row in shown["requests"]):
            found.append(shown["replica"])
        return bool(found)

    server.wait_for("the running request", 30, look)
    index = found[0].split("-")[0].removeprefix("api_server:")
    (process,) = (child for child in server.children() if _is_replica(child, index))
    return process


def _is_replica(process: psutil.Process, index: str) -> bool:
    command = f"{' '.join(process.cmdline())} "
    return "-m api_server " in command and f"--index {index} " in command


def content_of(visit: Visit, tmp_path: Path) -> str:
    """The text of the only answer, as the model wrote it."""
    with visit.page.expect_download() as download:
        visit.button("Export").click()
    download.value.save_as(tmp_path / "export.json")
    (conversation,) = json.loads((tmp_path / "export.json").read_text())["conversations"]
    (answer,) = (one for one in conversation["messages"].values() if one["role"] == "assistant")
    return str(answer["content"])


def test_figures_are_those_of_all_processes(visit_of_two: Visit, server: Server) -> None:
    visit = visit_of_two
    visit.page.locator(".top nav").get_by_role("link", name="Live").click()
    expect(visit.page.locator(".replicas tbody tr")).to_have_count(2)
    before = int(visit.page.evaluate(SUM))
    for _ in range(8):
        server.post("/v1/completions", {"prompt": "One, two,", "max_tokens": 4, "ignore_eos": True})
    visit.page.wait_for_function(f"(sum) => ({SUM})() === sum", arg=before + 32)


def test_an_answer_goes_on_when_its_process_is_killed(visit_of_two: Visit, server: Server, tmp_path: Path) -> None:
    visit = visit_of_two
    visit.set("Longest answer", str(LONG["max_tokens"]))
    visit.set("Temperature", "0")
    visit.set("Further fields", '{"ignore_eos": true}')
    visit.start("Tell me a story.")
    expect(visit.page.locator("article.assistant .text")).not_to_have_text("")
    # While generation stands still the answer cannot end before its process does.
    server.post("/pause_generation", {"mode": "in_place"})
    replica_that_answers(server).send_signal(signal.SIGKILL)
    server.post("/continue_generation", {})
    visit.wait_for_answer()
    assert "reconnected" in visit.page.locator(".figures").inner_text()
    asked = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a story."}], **LONG})
    assert content_of(visit, tmp_path) == asked["choices"][0]["message"]["content"]
