"""Sessions: token sequences of earlier requests that later ones continue, kept for a time and within bounds.

Sessions live in the scheduler because API processes hold nothing between requests, and any of them may get the next
turn. A restarted scheduler has no sessions. Knows tokens, names, and files of images, which it does not open. K and V
of equal beginnings are the prefix cache's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from interfaces import SESSION_MEDIA_BYTES, SessionAction, SessionAnswer, SessionMedium, SessionOrder

MAX_SESSIONS = 1024
# In all turns of one session together. Beyond, its oldest turns are forgotten, but never the newest.
MAX_TOKENS = 1 << 18
# Bytes of images and videos in all turns of one session, and in all sessions. Beyond, the oldest turns are forgotten,
# and the sessions that were not used for the longest time are closed.
MAX_MEDIA_BYTES = SESSION_MEDIA_BYTES
MAX_MEDIA_BYTES_TOGETHER = 512 << 20
# An unused session is closed after this time, unless it was opened with another.
IDLE_SECONDS = 3600.0

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Turn:
    """An ended request: its tokens, of which the first `prompt_len` were its prompt."""

    parent: str
    tokens: NDArray[np.int32]
    prompt_len: int
    media: Sequence[SessionMedium] = ()
    # Names it among all turns of this scheduler.
    number: int = 0


@dataclass
class Session:
    timeout: float
    # When it was last used, on the scheduler's clock.
    used: float
    # By request id, oldest first.
    turns: dict[str, Turn] = field(default_factory=dict)

    def keep(self, name: str, turn: Turn) -> None:
        """Keep a turn, and forget the oldest others if there are too many tokens, or bytes of images."""
        self.turns.pop(name, None)
        media: list[SessionMedium] = []
        for medium in turn.media:
            media.append(self._known(medium, media))
        self.turns[name] = replace(turn, media=media)
        size = sum(len(each.tokens) for each in self.turns.values())
        # The newest is the last. A session that forgot it could not go on.
        for oldest in list(self.turns)[:-1]:
            if size <= MAX_TOKENS and self.media_bytes <= MAX_MEDIA_BYTES:
                break
            size -= len(self.turns.pop(oldest).tokens)

    @property
    def media_bytes(self) -> int:
        """Bytes of images and videos, each counted once."""
        media = {id(medium): medium for turn in self.turns.values() for medium in turn.media}
        return sum(len(file) for medium in media.values() for file in medium.files)

    def _known(self, medium: SessionMedium, before: Sequence[SessionMedium]) -> SessionMedium:
        """The same image, from another turn if there is one: turns have those of the turns that they continue.

        `before` are those of its own turn.
        """
        media = (each for turn in self.turns.values() for each in turn.media)
        return next((each for each in (*media, *before) if each == medium), medium)

    def drop_after(self, name: str) -> None:
        """Forget the turns that continued `name`, and those after them."""
        children: dict[str, list[str]] = {}
        for child, turn in self.turns.items():
            children.setdefault(turn.parent, []).append(child)
        forgotten = children.pop(name, [])
        while forgotten:
            child = forgotten.pop()
            self.turns.pop(child, None)
            forgotten += children.pop(child, [])


class Sessions:
    """All open sessions, by id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._turns = 0

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
        media = list(turn.media) if turn else []
        number = turn.number if turn else 0
        return SessionAnswer(incarnation, order.number, refused, tokens, prompt_len, media, number)

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
        media = _with_known(order, session.turns.get(order.parent))
        if media is None:
            return f"the session {order.session!r} has the images of request {order.parent!r} no more"
        self._turns += 1
        session.keep(order.request, Turn(order.parent, order.tokens.copy(), order.prompt_len, media, self._turns))
        if media:
            self._free_media()
        return ""

    def _free_media(self) -> None:
        """Close the sessions that were not used for the longest time while all have too many bytes of images."""
        sizes = {name: session.media_bytes for name, session in self._open.items()}
        together = sum(sizes.values())
        for name in sorted(sizes, key=lambda name: self._open[name].used):
            if together <= MAX_MEDIA_BYTES_TOGETHER:
                return
            if sizes[name]:
                together -= sizes[name]
                del self._open[name]

    def _touched(self, name: str) -> Session | None:
        session = self._open.get(name)
        if session is not None:
            session.used = self._clock()
        return session


def _with_known(order: SessionOrder, parent: Turn | None) -> list[SessionMedium] | None:
    """The media of an order, with those of its parent for the ones without files. None if the parent is another one."""
    known = parent.media if parent is not None and parent.number == order.parent_turn else ()
    kinds = {kind: iter([medium for medium in known if medium.is_video is kind]) for kind in (False, True)}
    media = [medium if medium.files else next(kinds[medium.is_video], None) for medium in order.media]
    found = [medium for medium in media if medium is not None]
    return found if len(found) == len(media) else None


def _unknown(name: str) -> str:
    return f"Invalid request session id: no session {name!r} is open; open it with POST /open_session"
