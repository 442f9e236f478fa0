"""W3C's trace context: where a request stands in the trace of its caller, and what is passed on.

Knows the headers `traceparent` and `tracestate`. Knows nothing of spans or exporters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

# A later version may have more fields.
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
# One vendor's key, a tenant's at a system in the second form, and its value.
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
# Longest tracestate that is passed on, in characters. The specification asks for 512 at least.
LONGEST_STATE = 2048
# Most members of a tracestate, by the specification.
MOST_MEMBERS = 32
SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span: the caller's, or that of the request here. Ids are lower-case hexadecimal digits."""

    trace_id: str
    span_id: str
    flags: int = 0
    # The list of vendors' values, as it came.
    state: str = ""
    # Whether it is the span of this server, and not its caller's.
    made_here: bool = False

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def parent(self) -> str:
        """The value of `traceparent` for what this span asks of others."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def headers(self) -> dict[str, str]:
        """The headers of a request to another server."""
        return {"traceparent": self.parent, **({"tracestate": self.state} if self.state else {})}


# The span of the request that is being served: its own one if it is traced here, otherwise its caller's.
current: ContextVar[TraceContext | None] = ContextVar("trace context", default=None)


def caller(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Reads the caller's span from the headers of a request. None where there is none, or a malformed one."""
    parent = ""
    states = []
    for name, value in headers:
        if name == b"traceparent":
            parent = value.decode("latin-1")
        elif name == b"tracestate":
            states.append(value.decode("latin-1"))
    found = _PARENT.fullmatch(parent) if parent else None
    if found is None:
        return None
    state = ",".join(states)
    return TraceContext(found[1], found[2], int(found[3], 16) & SAMPLED, state if _usable(state) else "")


def _usable(state: str) -> bool:
    """Whether a tracestate is as the specification has it. One that is not is left out, and so are its members."""
    if len(state) > LONGEST_STATE:
        return False
    given = [member for part in state.split(",") if (member := part.strip(" \t"))]
    keys = {found[1] for member in given if (found := _MEMBER.fullmatch(member))}
    # A key may come once.
    return len(keys) == len(given) <= MOST_MEMBERS
