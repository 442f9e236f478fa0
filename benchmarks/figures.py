"""Shows the figures of works, for people as a table, and for programs as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


def show(figures: Mapping[str, Mapping[str, float]], as_json: bool) -> None:
    """Print the figures of each work by their names, with their units in them."""
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("work", "figure", "value")
    for name, values in figures.items():
        for figure, value in values.items():
            table.add_row(name, figure, f"{value:.3g}")
    Console().print(table)
