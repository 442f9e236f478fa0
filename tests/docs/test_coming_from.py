"""The pages for those who come from another server: what is said to be here is here, and what is not is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Table, all_flags, code_spans, is_path, serve_flags, tables, without_fences

PAGES = {
    "vLLM": "from_vllm.md",
    "SGLang": "from_sglang.md",
    "TGI": "from_tgi.md",
    "TEI": "from_tei.md",
    "llama.cpp": "from_llamacpp.md",
    "Ollama": "ollama.md",
}
METRICS = "".join(path.read_text() for path in (ROOT / "api_server" / "metrics").glob("*.py"))

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
# A path by itself, or behind a method.
_PATH = re.compile(r"(?:(?:GET|POST|PUT|DELETE) )?(/[\w./{}-]*)")
_METRIC = re.compile(r"(?:vllm:|sglang:|tgi_|tokenyard_)[a-z_]+")


def flags_in(text: str) -> list[str]:
    return [flag for span in code_spans(text) for flag in _FLAG.findall(span)]


def paths_in(text: str) -> list[str]:
    found = (_PATH.fullmatch(span) for span in code_spans(text))
    return [match[1] for match in found if match and match[1] != "/ui/"]


def page_of(name: str) -> str:
    return (ROOT / "docs" / PAGES[name]).read_text()


def maps(name: str) -> list[Table]:
    """The tables whose first column is the other server's."""
    return [table for table in tables(page_of(name)) if table.head[0] == name]


def ours(name: str) -> str:
    """The page without the columns of the other server and without code blocks."""
    text = re.sub(r"^    .*$", "", without_fences(page_of(name)), flags=re.MULTILINE)
    for table in maps(name):
        for row in table.rows:
            text = text.replace(f"| {row[0]} |", "|")
    return text


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_and_route_of_ours_exists(name: str) -> None:
    text = ours(name)
    flags = flags_in(text)
    assert len(flags) > 2
    assert set(flags) - all_flags() == set()
    assert [path for path in paths_in(text) if not is_path(path)] == []


@pytest.mark.parametrize("name", PAGES)
def test_what_is_the_same_is_here_and_what_is_not_is_not(name: str) -> None:
    rows = [row for table in maps(name) for row in table.rows]
    assert rows
    for theirs, here, *_ in rows:
        names = [*flags_in(theirs), *paths_in(theirs)]
        if here.startswith("the same"):
            assert names
            assert [name for name in names if name not in serve_flags() and not is_path(name)] == [], theirs
            continue
        kept = [name for name in names if name in serve_flags() or is_path(name)]
        assert set(kept) <= {*flags_in(here), *paths_in(here)}, f"{theirs}: ours has {kept}, and the page says {here}"


@pytest.mark.parametrize("name", PAGES)
def test_every_metric_exists(name: str) -> None:
    names = {metric for span in code_spans(ours(name)) for metric in _METRIC.findall(span)}
    assert [metric for metric in names if metric.removesuffix("_total") not in METRICS] == []


def test_each_page_is_of_another_server_and_in_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    found = {path.name for path in Path(ROOT / "docs").glob("from_*.md")}
    assert found == set(PAGES.values()) - {"ollama.md"}
    assert all(f": {page}\n" in listed for page in PAGES.values())
