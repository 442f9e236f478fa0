"""docs/metrics.md says of each metric what the code says."""

from __future__ import annotations

from tests.docs.metric_rows import lines
from tests.docs.pages import ROOT

LISTED = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `tokenyard_")]


def test_each_row_is_that_of_the_code() -> None:
    assert len(LISTED) > 50
    assert len(set(LISTED)) == len(LISTED)
    assert sorted(LISTED) == sorted(lines()), "python -m tests.docs.metric_rows prints the rows"
