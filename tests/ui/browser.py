"""A page in Debian's Chromium that fails its test on any error in the console and any request to another origin."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'tokenyard[test]'")

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, sync_playwright

from tests.system.server import Server

CHROMIUM = shutil.which("chromium")
# A loaded machine can stand still for a while.
MILLISECONDS = 30_000

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root in a container Chromium cannot make its sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=MILLISECONDS)
        yield browser
        browser.close()


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """While generation stands still no answer ends by itself, however long a button takes to appear."""
    server.post("/pause_generation", {"mode": "in_place"})
    try:
        yield
    finally:
        server.post("/continue_generation", {})


@dataclass
class Visit:
    """One visit of the page at /ui/, with storage of its own."""

    page: Page
    origin: str
    problems: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, browser: Browser, origin: str) -> Visit:
        context = browser.new_context(viewport={"width": 1300, "height": 850})
        context.set_default_timeout(MILLISECONDS)
        visit = cls(context.new_page(), origin)
        page = visit.page
        page.on("console", visit._said)
        page.on("pageerror", lambda error: visit.problems.append(f"error: {error}"))
        page.on("request", lambda request: visit._check(request.url))
        page.on("dialog", visit._interrupted)
        page.goto(f"{origin}/ui/")
        visit.settle()
        return visit

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(f"console: {message.text}")

    def _interrupted(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _check(self, url: str) -> None:
        if not url.startswith((self.origin + "/", "data:", "blob:")):
            self.problems.append(f"asked another origin: {url}")

    def settle(self) -> None:
        """Waits until the page knows the model."""
        self.page.locator(".top .model:not(:empty)").wait_for()

    def end(self) -> None:
        self.page.context.close()
        assert self.problems == []

    def button(self, name: str, nth: int = -1) -> Locator:
        found = self.page.get_by_role("button", name=name, exact=True)
        return found.last if nth == -1 else found.nth(nth)

    def send(self, text: str) -> None:
        """Sends a message, and waits until its answer is complete."""
        self.start(text)
        self.wait_for_answer()

    def start(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.button("Send").click()

    def wait_for_answer(self) -> None:
        self.page.locator("article.assistant[aria-busy=false]").last.wait_for()
        self.button("Send").wait_for()

    def set(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).first.fill(value)

    def count(self, name: str) -> int:
        """A count of the scheduler."""
        asked = (
            "(name) => fetch('/live').then((answer) => answer.json()).then((live) => live.scheduler?.counters[name])"
        )
        deadline = time.monotonic() + MILLISECONDS / 1000
        # A scheduler that a busy machine has kept silent for five seconds has no counts.
        while (found := self.page.evaluate(asked, name)) is None:
            assert time.monotonic() < deadline, f"the scheduler does not say {name}"
            self.page.wait_for_timeout(100)
        return int(found)

    def wait_for_count(self, name: str, before: int) -> None:
        """Waits until a count of the scheduler has grown; it says so twice a second."""
        deadline = time.monotonic() + MILLISECONDS / 1000
        while self.count(name) <= before:
            assert time.monotonic() < deadline, f"no request was counted as {name}"
            self.page.wait_for_timeout(100)

    @property
    def answer(self) -> str:
        """The text of the last answer."""
        return self.page.locator("article.assistant .text").last.inner_text().strip()

    @property
    def branch(self) -> str:
        """Which branch of the last message is shown, such as 2/3."""
        return self.page.locator(".branches span").last.inner_text()
