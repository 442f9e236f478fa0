"""`make docs`: the site is built without a warning, and its pages ask no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import PAGES, ROOT

# What a browser loads by itself: scripts, styles, pictures, frames. Links to follow are not among it.
_LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"|<link\b[^>]*\bhref=\"([^\"]+)\"")


def test_the_site_is_built_and_asks_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stderr}\nWithout mkdocs: pip install 'tokenyard[docs]'"
    names = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES[1:]]
    built = [(tmp_path / name).read_text() for name in (Path("index.html"), *names)]
    loaded = [source or style for page in built for source, style in _LOADED.findall(page)]
    assert loaded
    assert [url for url in loaded if re.match(r"(?:https?:)?//", url)] == []
    assert "Two commands" in built[0]
