"""A line in the log for each HTTP request, with `--access-log`.

Knows the caller, the route, the outcome and the cost of a request; never texts or keys. Wraps the application, so that
without the flag it costs nothing. With it, it costs a little per request, and nothing per token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server.answers.choice import Choice
from api_server.answers.one_shot import OneShot
from api_server.errors import RequestFailed
from api_server.outcomes import Outcome, outcome_of
from shared.settings import Settings

log = logging.getLogger("tokenyard.access")

# Stands for the status when the client left before it had one, as in nginx.
CLIENT_GONE = 499
# Longest path in characters; a head has room for many more.
LONGEST_PATH = 200


@dataclass
class Entry:
    """Facts of the current request. `generation.py`, `pooling.py` and `state.py` add to it."""

    started: float = field(default_factory=time.monotonic)
    status: int = 0
    complete: bool = False
    error: RequestFailed | None = None
    # The choices of each generation; they grow until the request ends.
    choices: list[Sequence[Choice]] = field(default_factory=list)
    # The one-shot requests.
    shots: list[OneShot] = field(default_factory=list)

    def send(self, send: Send) -> Callable[[Message], Awaitable[None]]:
        """Wraps `send` to record the status and the size."""

        def watched(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            else:
                self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            return send(message)

        return watched

    @property
    def outcome(self) -> str:
        if self.error is not None and not self.error.counted:
            return outcome_of(self.error.kind)
        if not self.complete or self._cut_off:
            return Outcome.CANCELLED
        if self.status < 400:
            return Outcome.OK
        if self.status == 503:  # of a health page, which records no error
            return Outcome.UNAVAILABLE
        return Outcome.FAILED if self.status >= 500 else Outcome.INVALID

    @property
    def _cut_off(self) -> bool:
        return any(choice.finish is not None and choice.finish.kind == "cancelled" for choice in self._all)

    @property
    def _all(self) -> list[Choice]:
        return [choice for choices in self.choices for choice in choices]

    def facts(self) -> dict[str, Any]:
        """Outcome and seconds, and the tokens of a request that has any."""
        found: dict[str, Any] = {"outcome": self.outcome, "seconds": round(time.monotonic() - self.started, 4)}
        if self.shots:
            found["texts"] = sum(shot.texts for shot in self.shots)
            found["prompt_tokens"] = sum(shot.tokens for shot in self.shots)
        if generated := sum(shot.generated for shot in self.shots):
            found["completion_tokens"] = generated
        if sounds := [shot.sound for shot in self.shots if shot.sound is not None]:
            found["audio_seconds"] = round(sum(sound.seconds for sound in sounds), 3)
            found["first_audio_seconds"] = next(
                (round(sound.first - self.started, 4) for sound in sounds if sound.first is not None), None
            )
        if pictures := [shot.pictures for shot in self.shots if shot.pictures is not None]:
            found["images"] = sum(each.count for each in pictures)
            found["pixels"] = sum(each.count * each.pixels for each in pictures)
        choices = self._all
        if not choices:
            return found
        prompts = {(id(choice.request), choice.request_index): choice.prompt_tokens for choice in choices}
        found["prompt_tokens"] = sum(prompts.values())
        found["cached_tokens"] = sum(choice.cached_tokens for choice in choices)
        found["completion_tokens"] = sum(choice.completion_tokens for choice in choices)
        queued = [choice.queued for choice in choices if choice.queued is not None]
        first = [choice.first_token for choice in choices if choice.first_token is not None]
        if queued:
            found["queue_seconds"] = round(max(queued), 4)
        if first:
            found["first_token_seconds"] = round(min(first) - self.started, 4)
        return found


current: ContextVar[Entry | None] = ContextVar("entry of the access log", default=None)


def logged(application: ASGIApp, settings: Settings) -> ASGIApp:
    """Wraps the application with the access log if the settings ask for one."""
    return AccessLog(application) if settings.access_log else application


class AccessLog:
    """The ASGI application that writes the access log around another one."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        log.setLevel(logging.INFO)  # the flag asks for it, at every log level

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        entry = Entry()
        current.set(entry)
        try:
            await self._application(scope, receive, entry.send(send))
        finally:
            _write(scope, entry)


def _write(scope: Scope, entry: Entry) -> None:
    state = scope.get("state", {})
    caller = state.get("caller")
    client = scope.get("client")
    # The path as it was sent, with its escapes, without the query, in which clients put keys.
    path = scope["raw_path"].decode("latin-1")[:LONGEST_PATH]
    status = entry.status or CLIENT_GONE
    facts = {
        "request_id": state.get("request_id"),
        "client": client[0] if client else None,
        "key": caller.name if caller is not None and caller.name else None,
        "method": scope["method"],
        "path": path,
        "status": status,
        **entry.facts(),
    }
    log.info("access", extra={"facts": {name: fact for name, fact in facts.items() if fact is not None}})
