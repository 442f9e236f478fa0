"""The seam between the request path and the metrics: an observer of generations.

Calls are synchronous, on the event loop, and must be cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from api_server.answers.choice import Choice
    from api_server.errors import RequestFailed


class Observer(Protocol):
    """Receives the events of generations. All times are in seconds, differences of `time.monotonic()`."""

    def received(self, path: str) -> None:
        """A request for generation reached `generate`, before validation."""

    def started(self, choice: Choice) -> None:
        """A validated choice goes to the scheduler."""

    def tokens(self, choice: Choice, count: int, since_last: float) -> None:
        """`count` tokens arrived together, `since_last` after the ones before them (after submission for the first)."""

    def finished(self, choice: Choice) -> None:
        """`choice.finish` is set; every other fact of it is final. Called once for each started choice that was not
        failed or abandoned."""

    def abandoned(self, choice: Choice) -> None:
        """The client went away (or another choice of the request failed) before the end."""

    def failed(self, path: str, error: RequestFailed) -> None:
        """A request on this path was answered with an error, before or after its first token."""
