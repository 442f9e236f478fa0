"""Passes a client's wishes about reasoning to the chat template, as the variables that templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Qwen3, GLM and the embedded model have the first, DeepSeek V3.1 and Granite the second.
_SWITCHES = ("enable_thinking", "thinking")


def template_options(
    given: Mapping[str, Any] | None, effort: str | None = None, enabled: bool | None = None, budget: int | None = None
) -> dict[str, Any]:
    """Adds an effort to `given`, which also switches thinking on, or off if it is `none`; present values stay.

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
