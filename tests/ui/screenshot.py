"""Makes the picture of the README: `python -m tests.ui.screenshot http://127.0.0.1:8000 docs/pictures/page.png`."""

from __future__ import annotations

import sys

from tests.ui.browser import Visit, chromium


def main(origin: str, file: str) -> None:
    """Asks a question at the page of the server at `origin`, and saves a picture of the answer's token map."""
    with chromium() as browser:
        visit = Visit.begin(browser, origin)
        visit.page.set_viewport_size({"width": 1100, "height": 620})
        visit.set("Temperature", "1.3")
        visit.set("Seed", "5")
        visit.page.get_by_label("Log-probabilities").check()
        visit.send("Tell me a short story about a train.")
        visit.button("Token map").click()
        visit.page.locator(".token").nth(7).click()
        visit.page.screenshot(path=file)
        visit.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
