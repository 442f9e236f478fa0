"""The limits that docs/reliability.md names are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_server.body import bodies, item_limits
from api_server.dialects.sglang.tokenize import MAX_PROMPTS
from api_server.dialects.tgi.validation import MAX_STOP_SEQUENCES
from api_server.http import heads, protocol
from api_server.text import stop_patterns

PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
SECTION = PAGE.partition("## Large requests")[2].partition("\n## ")[0]
PORT = PAGE.partition("## At the port")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    "words",
    [
        f"{bodies.MOST_WEIGHT >> 20} MiB (",
        f"process: {bodies.MOST_HELD >> 20} MiB",
        f"{bodies.KEPT_FOR_SMALL >> 20} MiB more for bodies up to {bodies.SMALL >> 10} KiB",
        f"{item_limits.MOST_TURNS:,} messages, and {item_limits.MOST_PARTS:,} parts",
        f"{item_limits.MOST_TOOLS:,} tools",
        f"{item_limits.MOST_STOP_IDS} stop tokens",
        f"(TGI: {MAX_STOP_SEQUENCES}), {stop_patterns.MOST_PATTERNS} stop patterns",
        f"{item_limits.MOST_TOKEN_IDS:,} allowed tokens or biases",
        f"{MAX_PROMPTS:,} texts or lists",
        f"each answer: {item_limits.MOST_PROMPT_TOKENS:,}",
        f"sees them: {item_limits.MAX_TEXT:,}",
        f"more than {bodies.LIGHT >> 10} KiB",
    ],
)
def test_a_limit_is_documented_as_it_is(words: str) -> None:
    assert words in SECTION


@pytest.mark.parametrize(
    "words",
    [
        f"| {heads.MAX_HEAD_BYTES >> 10} KiB of request line and headers, {heads.MAX_HEADERS} headers",
        f"| {protocol.REQUEST_SECONDS:.0f} s for a head, and from one piece of a body to the next |",
        f"| {protocol.REQUEST_SECONDS:.0f} s for a body as a whole, and a second more for each "
        f"{protocol.BODY_BYTES_PER_SECOND:,} bytes |",
        f"| {protocol.UNREAD_SECONDS / 60:.0f} minutes in which a client reads nothing",
    ],
)
def test_a_bound_at_the_port_is_documented_as_it_is(words: str) -> None:
    assert words in PORT
