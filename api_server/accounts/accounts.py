"""The accounts of keys: an observer that gathers what they use, and the door that keeps limits.

What is used is gathered in numbers and written down a tenth of a second later, as the metrics are. Knows callers and
the facts of answers; knows neither dialects nor where figures are shown.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from api_server.accounts.ledger import Ledger, Level, Limits, StreamName, Use
from api_server.answers.choice import Choice
from api_server.answers.one_shot import OneShot
from api_server.errors import ErrorKind, RequestFailed
from shared.access_keys import AccessKeys, Caller

# Seconds for which use is gathered before it is written down.
WRITE_SECONDS = 0.1


class Accounts:
    """The accounts of one API process. Requests without a key have none."""

    def __init__(self, ledger: Ledger, keys: AccessKeys) -> None:
        self.ledger = ledger
        self._pending: dict[tuple[str, str], Use] = {}
        self._limits: dict[str, Limits] = {}
        self._due: asyncio.TimerHandle | None = None
        self.rotate(keys)

    def rotate(self, keys: AccessKeys) -> None:
        """Takes the limits of these keys from now on."""
        limited = [caller for caller in keys.callers if caller.requests_per_minute or caller.tokens_per_minute]
        self._limits = {c.name: Limits(c.requests_per_minute, c.tokens_per_minute) for c in limited}
        self.ledger.keep_buckets(self._limits)

    def admit(self, caller: Caller, stream: StreamName | None = None) -> tuple[Mapping[str, str], RequestFailed | None]:
        """Counts a request, unless it takes up a stream that was counted.

        Returns the headers of its answer, and its error if it may not come in.
        """
        limits = self._limits.get(caller.name)
        if limits is None:
            return {}, None
        # Tokens that are used and not yet written down would come in for nothing.
        self.write()
        verdict = self.ledger.admit(caller.name, limits, stream)
        headers = {name: value for kind, level in verdict.levels.items() for name, value in _headers(kind, level)}
        if verdict.admitted:
            return headers, None
        kind, level = max(verdict.levels.items(), key=lambda item: item[1].wait)
        seconds = max(1, math.ceil(level.wait))
        remedy = f"come again in {seconds} s, or ask the server's operator for more"
        message = f"the key {caller.name!r} has used its {level.limit} {kind} a minute: {remedy}"
        return headers, RequestFailed(ErrorKind.RATE_LIMITED, message, retry_after=seconds)

    def write(self) -> None:
        """Writes down what was gathered; what cannot be written now is kept for later."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._pending and self.ledger.add(self._pending.values(), lambda key: self._limits.get(key, Limits())):
            self._pending = {}

    def close(self) -> None:
        self.write()
        self.ledger.close()

    def received(self, path: str) -> None:
        """Nothing is known of the request yet."""

    def left(self, path: str) -> None:
        """Nothing was computed for it."""

    def started(self, choice: Choice) -> None:
        """Counts the prompt once for each answer, as each is computed from it."""
        use = self._use(choice.tenant, choice.model)
        if use is not None:
            use.requests += 1
            use.prompt_tokens += choice.prompt_tokens

    def tokens(self, choice: Choice, count: int, since_last: float) -> None:
        """Tokens are counted at the end."""

    def finished(self, choice: Choice) -> None:
        use = self._use(choice.tenant, choice.model)
        if use is not None:
            use.generation_tokens += choice.completion_tokens
            use.cached_tokens += choice.cached_tokens

    def abandoned(self, choice: Choice) -> None:
        """Counts the tokens that were generated for a client that has left."""
        self.finished(choice)

    def choice_failed(self, choice: Choice, error: RequestFailed) -> None:
        """Tokens of an answer that failed on the way are not counted."""

    def texts_submitted(self, shot: OneShot) -> None:
        use = self._use(shot.tenant, shot.model)
        if use is not None:
            use.requests += 1
            use.prompt_tokens += shot.tokens

    def texts_pooled(self, shot: OneShot) -> None:
        self._count_speech(shot)

    def texts_abandoned(self, shot: OneShot) -> None:
        self._count_speech(shot)

    def _count_speech(self, shot: OneShot) -> None:
        """The texts have been counted."""
        use = self._use(shot.tenant, shot.model) if shot.generated else None
        if use is not None:
            use.generation_tokens += shot.generated

    def clip(self, seconds: float, took: float) -> None:
        """Sound is counted by the tokens of its transcript, however many windows it has."""

    def texts_failed(self, shot: OneShot, error: RequestFailed) -> None:
        """The texts have been counted."""

    def image(self, seconds: float) -> None:
        """Images are counted by their tokens."""

    def failed(self, path: str, error: RequestFailed) -> None:
        """What was computed before a failure has been counted as far as it is known."""

    def _use(self, key: str, model: str) -> Use | None:
        """The use that is gathered for a key and a model; None without a key."""
        if not key:
            return None
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(WRITE_SECONDS, self.write)
        return self._pending.setdefault((key, model), Use(key, model))


def _headers(kind: str, level: Level) -> list[tuple[str, str]]:
    return [
        (f"x-ratelimit-limit-{kind}", str(level.limit)),
        (f"x-ratelimit-remaining-{kind}", str(max(0, math.floor(level.left)))),
        (f"x-ratelimit-reset-{kind}", f"{level.full:.3f}s"),
    ]
