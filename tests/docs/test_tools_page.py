"""docs/tools.md lists the formats that there are."""

from __future__ import annotations

import re
from pathlib import Path

from api_server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def listed(heading: str) -> set[str]:
    table = PAGE.partition(f"| {heading} | models |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}


def test_every_format_is_listed() -> None:
    assert listed("tool parser") == set(TOOL_FORMATS)
    assert listed("reasoning parser") == set(REASONING_FORMATS)
