"""How a client's wishes about reasoning reach the chat template: as the variables that templates look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SWITCHES = ("enable_thinking", "thinking")
"""Qwen3, GLM and the embedded model have the first, DeepSeek V3.1 and Granite the second."""


def template_options(
    given: Mapping[str, Any] | None, effort: str | None = None, enabled: bool | None = None, budget: int | None = None
) -> dict[str, Any]:
    """`given` with an effort, which also switches thinking on, or off if it is `none`; what is there already stays.

    A `budget` of no tokens switches it off, too.
    """
    options = dict(given or {})
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
        enabled = effort != "none" if enabled is None else enabled
    if budget == 0:
        enabled = False
    if enabled is not None:
        for name in _SWITCHES:
            options.setdefault(name, enabled)
    return options
