"""Links within README.md and docs/ lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name_of, without_fences

_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as code hosts and the site make them."""
    heads = re.findall(r"^#+ (.+)$", without_fences(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", without_fences(page.read_text()))):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert target.is_relative_to(ROOT / "docs") or page.parent == ROOT, f"{link} is not in the site"
        assert not anchor or anchor in anchors(target), link


def test_every_page_can_be_found_from_the_readme_or_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text() + "".join(page.read_text() for page in PAGES)
    assert [page.name for page in PAGES[1:] if f"{page.name})" not in listed and f"{page.name}\n" not in listed] == []
