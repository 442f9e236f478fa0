"""docs/settings.md says what the code says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shared.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize("field", dataclasses.fields(Settings), ids=lambda field: field.name)
def test_every_setting_is_described_as_in_the_code(field: dataclasses.Field[object]) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{field.name}` |")]
    assert len(rows) == 1
    assert f"`TOKENYARD_{field.name.upper()}`" in rows[0]
    assert field.metadata["help"] in rows[0]
