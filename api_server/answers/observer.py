"""The seam between the request path and the metrics: an observer of generations and of one-shot requests.

Calls are synchronous, on the event loop, and must be cheap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from api_server.answers.choice import Choice
    from api_server.answers.one_shot import OneShot
    from api_server.errors import RequestFailed


class Observer(Protocol):
    """Receives the events of requests. All times are in seconds, differences of `time.monotonic()`."""

    def received(self, path: str) -> None:
        """A request for generation, or for values of texts, was read; it is not validated yet."""

    def left(self, path: str) -> None:
        """The client of a received request went away before its choices were started or its texts were submitted."""

    def started(self, choice: Choice) -> None:
        """A validated choice goes to the scheduler."""

    def tokens(self, choice: Choice, count: int, since_last: float) -> None:
        """`count` tokens arrived together, `since_last` after the ones before them (after submission for the first)."""

    def finished(self, choice: Choice) -> None:
        """`choice.finish` is set; every other fact of it is final. Called once for each started choice that was not
        failed or abandoned."""

    def abandoned(self, choice: Choice) -> None:
        """The client went away (or another choice of the request failed) before the end."""

    def choice_failed(self, choice: Choice, error: RequestFailed) -> None:
        """The choice ended with this error after its start. `failed` of its request follows."""

    def texts_submitted(self, shot: OneShot) -> None:
        """The texts of a one-shot request go to the scheduler."""

    def texts_pooled(self, shot: OneShot) -> None:
        """The values of all its texts are there."""

    def texts_abandoned(self, shot: OneShot) -> None:
        """The client of a one-shot request went away before the end."""

    def texts_failed(self, shot: OneShot, error: RequestFailed) -> None:
        """The one-shot request ended with this error after its submission. `failed` follows."""

    def image(self, seconds: float) -> None:
        """An image of a request is at hand, after `seconds` of reading it; 0: it was in the cache."""

    def clip(self, seconds: float, took: float) -> None:
        """A sound file of `seconds` was read, which took so long."""

    def failed(self, path: str, error: RequestFailed) -> None:
        """A request on this path was answered with an error, before or after its first token."""


@contextmanager
def receiving(observers: Sequence[Observer], path: str) -> Iterator[None]:
    """Report a request that was read, and its end if its client goes away within the block.

    The block ends where the choices are started or the texts submitted: their own ends are reported from then on.
    """
    for observer in observers:
        observer.received(path)
    try:
        yield
    except asyncio.CancelledError:
        for observer in observers:
            observer.left(path)
        raise
