"""`context_management`: the parts of a conversation that the model no longer sees, by the rules of Anthropic's API.

Old thinking, and the results of old tool uses, are removed from the messages before they are read. An edit that has
nothing to do is accepted, of any kind; one that would have to act and cannot is refused. Knows blocks, and no tokens:
the caller counts them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api_server.errors import unsupported

Messages = Sequence[dict[str, Any]]
# Counts the tokens of the prompt with these messages.
Count = Callable[[Messages], Awaitable[int]]

_CLEARED = "[The result of this tool use was removed to save context.]"
# Defaults that Anthropic's API documents for absent values.
_TRIGGER_TOKENS = 100_000
_COMPACTION_TOKENS = 150_000
_KEPT_TOOL_USES = 3
_KEPT_THINKING_TURNS = 1


class _Edit(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class InputTokens(_Edit):
    type: Literal["input_tokens"]
    value: int = Field(ge=0)


class ToolUses(_Edit):
    type: Literal["tool_uses"]
    value: int = Field(ge=0)


class ThinkingTurns(_Edit):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class AllThinkingTurns(_Edit):
    type: Literal["all"]


class ClearToolUses(_Edit):
    """Replaces results of old tool uses by a short text."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] | None = Field(
        None, description="Above this the edit acts; default: 100000 input tokens"
    )
    keep: ToolUses | None = Field(None, description="The last tool uses, which stay; default 3")
    clear_at_least: InputTokens | None = Field(None, description="Tokens without which the edit is not worth it")
    exclude_tools: Annotated[list[str], Field(max_length=1000)] | None = Field(
        None, description="Tools whose results stay"
    )
    clear_tool_inputs: bool | Annotated[list[str], Field(max_length=1000)] | None = Field(
        None, description="The arguments of these uses go, too: of all tools, or of those named"
    )


class ClearThinking(_Edit):
    """Removes thinking of old turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Annotated[ThinkingTurns | AllThinkingTurns, Field(discriminator="type")] | None = Field(
        None, description="The last turns with thinking, which keep it; default 1"
    )


class Compact(_Edit):
    """Replaces the conversation by a summary: not built, and refused when it would have to act."""

    type: Literal["compact_20260112"]
    trigger: InputTokens | None = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None


class ContextManagement(_Edit):
    edits: (
        Annotated[
            list[Annotated[ClearToolUses | ClearThinking | Compact, Field(discriminator="type")]], Field(max_length=8)
        ]
        | None
    ) = Field(None, description="Edits of the conversation, one after the other")


@dataclass(frozen=True)
class Edited:
    """The edited conversation, and the edits to report to the client; `applied` None: it asked for no edit."""

    messages: Messages
    applied: list[dict[str, Any]] | None = None


async def edited(messages: Messages, management: ContextManagement | None, count: Count) -> Edited:
    """Applies the edits of a request. Raises RequestFailed for an edit that would have to act and cannot."""
    if management is None:
        return Edited(messages)
    applied: list[dict[str, Any]] = []
    for i, edit in enumerate(management.edits or ()):
        if isinstance(edit, Compact):
            limit = edit.trigger.value if edit.trigger else _COMPACTION_TOKENS
            if await count(messages) > limit:
                raise unsupported(f"context_management.edits[{i}]", f"compacting a context of over {limit} tokens")
            continue
        left, report = await _without(messages, edit, count)
        if report is not None:
            applied.append({"type": edit.type, **report})
            messages = left
    return Edited(messages, applied)


async def _without(
    messages: Messages, edit: ClearToolUses | ClearThinking, count: Count
) -> tuple[Messages, dict[str, int] | None]:
    """Applies one edit: returns the messages left, and its report; None when the edit has not acted."""
    if isinstance(edit, ClearThinking):
        left, cleared = _without_thinking(messages, edit)
        name = "cleared_thinking_turns"
        least = 0
    else:
        if not await _is_triggered(messages, edit, count):
            return messages, None
        left, cleared = _without_results(messages, edit)
        name = "cleared_tool_uses"
        least = edit.clear_at_least.value if edit.clear_at_least else 0
    if not cleared:
        return messages, None
    tokens = max(0, await count(messages) - await count(left))
    return (left, {name: cleared, "cleared_input_tokens": tokens}) if tokens >= least else (messages, None)


async def _is_triggered(messages: Messages, edit: ClearToolUses, count: Count) -> bool:
    trigger = edit.trigger or InputTokens(type="input_tokens", value=_TRIGGER_TOKENS)
    if isinstance(trigger, ToolUses):
        return len(_uses(messages)) > trigger.value
    return await count(messages) > trigger.value


def _without_thinking(messages: Messages, edit: ClearThinking) -> tuple[Messages, int]:
    """Removes old thinking. A user's text separates turns; results of tools belong to the turn that called them."""
    if edit.keep == "all" or isinstance(edit.keep, AllThinkingTurns):
        return messages, 0
    keep = edit.keep.value if isinstance(edit.keep, ThinkingTurns) else _KEPT_THINKING_TURNS
    turns: list[list[int]] = [[]]
    for i, message in enumerate(messages):
        if message.get("role") == "user" and not any(_is(b, "tool_result") for b in _blocks(message)):
            turns.append([])
        elif any(_is_thinking(block) for block in _blocks(message)):
            turns[-1].append(i)
    cleared = [turn for turn in turns if turn][:-keep]
    places = {i for turn in cleared for i in turn}
    kept = (
        {**m, "content": [b for b in _blocks(m) if not _is_thinking(b)]} if i in places else m
        for i, m in enumerate(messages)
    )
    return [message for message in kept if message.get("content") != []], len(cleared)


def _without_results(messages: Messages, edit: ClearToolUses) -> tuple[Messages, int]:
    uses = _uses(messages)
    keep = edit.keep.value if edit.keep else _KEPT_TOOL_USES
    old = list(uses.items())[: max(0, len(uses) - keep)]
    excluded = frozenset(edit.exclude_tools or ())
    given = edit.clear_tool_inputs
    cleared = {call_id: name for call_id, name in old if name not in excluded}
    emptied = frozenset(given if isinstance(given, list) else ())
    without_input = {i for i, name in cleared.items() if given is True or name in emptied}

    def left(block: Any) -> Any:
        if _is(block, "tool_result") and block.get("tool_use_id") in cleared:
            return {**block, "content": _CLEARED}
        if _is(block, "tool_use") and block.get("id") in without_input:
            return {**block, "input": {}}
        return block

    return [{**m, "content": list(map(left, _blocks(m)))} if _blocks(m) else m for m in messages], len(cleared)


def _uses(messages: Messages) -> dict[str, str]:
    """Tool uses that have a result, oldest first: their ids, and the names of the tools."""
    blocks = [block for message in messages for block in _blocks(message)]
    answered = {b.get("tool_use_id") for b in blocks if _is(b, "tool_result") and isinstance(b.get("tool_use_id"), str)}
    return {
        b["id"]: str(b.get("name"))
        for b in blocks
        if _is(b, "tool_use") and isinstance(b.get("id"), str) and b["id"] in answered
    }


def _blocks(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is(block: Any, kind: str) -> bool:
    return isinstance(block, dict) and block.get("type") == kind


def _is_thinking(block: Any) -> bool:
    return _is(block, "thinking") or _is(block, "redacted_thinking")
