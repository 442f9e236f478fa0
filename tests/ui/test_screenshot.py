"""The script that makes the README's picture works, and the picture is that of the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.system.server import Server

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'tokenyard[test]'")

from tests.ui import screenshot
from tests.ui.browser import needs_chromium

pytestmark = needs_chromium
README = Path(__file__).parents[2] / "docs" / "pictures" / "page.png"


def test_the_picture_is_made(embedded: Server, tmp_path: Path) -> None:
    file = tmp_path / "page.png"
    screenshot.main(embedded.url, str(file))
    with Image.open(file) as made, Image.open(README) as shown:
        assert made.size == shown.size
        # Tokens are coloured, letters are smoothed: a page that is blank or broken has few colours.
        colours = made.convert("RGB").getcolors(1 << 20)
        assert colours is not None
        assert len(colours) > 100
