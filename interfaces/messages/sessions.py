"""Messages about sessions, between API replicas and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from interfaces.wire.codec import I32, message

# Most bytes of the images and videos of one session's turns. A turn that would have more is refused before it runs.
SESSION_MEDIA_BYTES = 64 << 20


class SessionAction:
    """Codes of `SessionOrder.action`.

    OPEN and CLOSE a session, with `timeout` seconds without use (0: the usual time) after which it is closed by itself.
    REMEMBER keeps the tokens of a `request` that has ended, which went on from `parent` (empty: from none). RECALL
    returns them (no request: none); with `replace`, requests that went on from that one are forgotten, or everything.
    """

    OPEN = 0
    CLOSE = 1
    RECALL = 2
    REMEMBER = 3


@dataclass(frozen=True, slots=True)
class SessionMedium:
    """An image or a video of a session, as a client sent it: one file, or with `is_frames` images of its frames.

    `options` are the client's wishes for it, as JSON. Without files, in REMEMBER, it is the next medium of its kind in
    the turn that the order names, which the session has already.
    """

    files: list[bytes]
    is_video: bool
    is_frames: bool
    options: str


@message(9)
@dataclass(frozen=True, slots=True)
class SessionOrder:
    """An action on a session. `number` is the replica's name for it, and comes back in the answer.

    `media` are the images and the videos among the tokens, each kind in its order. `parent_turn` is the answer's `turn`
    of RECALL, where media without files are those of `parent`: another turn may have taken its name since.
    """

    number: int
    action: int
    session: str
    request: str = ""
    parent: str = ""
    replace: bool = False
    timeout: float = 0.0
    tokens: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    prompt_len: int = 0
    media: list[SessionMedium] = field(default_factory=list)
    parent_turn: int = 0


@message(10)
@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """Answers a session order: it was done, unless `refused` has a reason. `tokens` are those recalled, the prompt
    first, and `media` what they stand for; `turn` is the turn's number in its scheduler, or 0."""

    incarnation: int
    number: int
    refused: str
    tokens: I32
    prompt_len: int
    media: list[SessionMedium] = field(default_factory=list)
    turn: int = 0
