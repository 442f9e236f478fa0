"""Logits processors that a client may name: those that the operator lists, never code of its own."""

from __future__ import annotations

from collections.abc import Collection


def processor_problem(name: str, allowed: Collection[str]) -> str | None:
    """The reason why a named processor cannot run, or None. An empty name asks for none."""
    if not name or name in allowed:
        return None
    if not allowed:
        return "The server is not configured to enable custom logit processor; start it with --logit-processors."
    what = "code sent by clients is never run" if name.lstrip().startswith("{") else f"there is no {name[:100]!r}"
    return f"custom_logit_processor must name one of {', '.join(sorted(allowed))}; {what}."
