"""Sessions: token sequences of earlier requests that later ones continue, kept for a time and within bounds.

Sessions live in the scheduler because API processes hold nothing between requests, and any of them may get the next
turn. A restarted scheduler has no sessions. Knows tokens and names. K and V of equal beginnings are the prefix cache's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interfaces import SessionAction, SessionAnswer, SessionOrder

MAX_SESSIONS = 1024
# In all turns of one session together. Beyond, its oldest turns are forgotten.
MAX_TOKENS = 1 << 18
# An unused session is closed after this time, unless it was opened with another.
IDLE_SECONDS = 3600.0

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Turn:
    """An ended request: its tokens, of which the first `prompt_len` were its prompt."""

    parent: str
    tokens: NDArray[np.int32]
    prompt_len: int


@dataclass
class Session:
    timeout: float
    # When it was last used, on the scheduler's clock.
    used: float
    # By request id, oldest first.
    turns: dict[str, Turn] = field(default_factory=dict)

    def keep(self, name: str, turn: Turn) -> None:
        """Keep a turn, and forget the oldest ones if there are too many tokens."""
        self.turns.pop(name, None)
        self.turns[name] = turn
        size = sum(len(each.tokens) for each in self.turns.values())
        for oldest in list(self.turns):
            if size <= MAX_TOKENS:
                break
            size -= len(self.turns.pop(oldest).tokens)

    def drop_after(self, name: str) -> None:
        """Forget the turns that continued `name`, and those after them."""
        for child in [child for child, turn in self.turns.items() if turn.parent == name]:
            if self.turns.pop(child, None) is not None:
                self.drop_after(child)


class Sessions:
    """All open sessions, by id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def obey(self, order: SessionOrder, incarnation: int) -> SessionAnswer:
        """Carry an order out. The answer says why it was refused, if it was."""
        refused = ""
        turn: Turn | None = None
        match order.action:
            case SessionAction.OPEN:
                refused = self._start(order)
            case SessionAction.CLOSE:
                refused = "" if self._open.pop(order.session, None) else _unknown(order.session)
            case SessionAction.RECALL:
                refused, turn = self._recall(order)
            case SessionAction.REMEMBER:
                refused = self._remember(order)
            case _:
                refused = f"there is no action {order.action} for sessions"
        tokens, prompt_len = (turn.tokens, turn.prompt_len) if turn else (_NO_TOKENS, 0)
        return SessionAnswer(incarnation, order.number, refused, tokens, prompt_len)

    def forget_idle(self) -> None:
        """Close the sessions whose time is over."""
        now = self._clock()
        for name in [name for name, each in self._open.items() if now - each.used > each.timeout]:
            del self._open[name]

    def _start(self, order: SessionOrder) -> str:
        self.forget_idle()
        if order.session in self._open:
            return f"the session {order.session!r} is open already; close it first, or choose another session_id"
        if len(self._open) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open, and more are not possible; close some"
        self._open[order.session] = Session(order.timeout or IDLE_SECONDS, self._clock())
        return ""

    def _recall(self, order: SessionOrder) -> tuple[str, Turn | None]:
        session = self._touched(order.session)
        if session is None:
            return _unknown(order.session), None
        if not order.request:
            if order.replace:
                session.turns.clear()
            return "", None
        turn = session.turns.get(order.request)
        if turn is None:
            return (
                f"Invalid request session id: the session {order.session!r} has no request {order.request!r} that has "
                "ended; go on from another one, or from none",
                None,
            )
        if order.replace:
            session.drop_after(order.request)
        return "", turn

    def _remember(self, order: SessionOrder) -> str:
        session = self._touched(order.session)
        if session is None:
            return _unknown(order.session)
        session.keep(order.request, Turn(order.parent, order.tokens.copy(), order.prompt_len))
        return ""

    def _touched(self, name: str) -> Session | None:
        session = self._open.get(name)
        if session is not None:
            session.used = self._clock()
        return session


def _unknown(name: str) -> str:
    return f"Invalid request session id: no session {name!r} is open; open it with POST /open_session"
