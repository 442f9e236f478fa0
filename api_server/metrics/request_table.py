"""The requests of one API process, open ones and the latest that ended, for operators and the page at /ui/.

Facts and counts only: no text of a prompt or an answer, and no key. The decisions about a request are the scheduler's.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from api_server.answers.choice import Choice
from api_server.answers.one_shot import OneShot
from api_server.dialects.openai.errors import render_error
from api_server.engine import scheduling
from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed
from api_server.web.access import operators_only
from api_server.web.endpoint import Call, Document, endpoint

MOST_ENDED = 200


class _Entry:
    """One answer of a request; `choice` is None once it has gone without an end that was reported."""

    __slots__ = ("_choice", "received", "tenant")

    def __init__(self, choice: Choice) -> None:
        self._choice = weakref.ref(choice)
        self.received = time.time()
        self.tenant = scheduling.current.get().tenant

    @property
    def choice(self) -> Choice | None:
        return self._choice()

    def row(self, state: str, choice: Choice) -> dict[str, Any]:
        last = choice.last_token or time.monotonic()
        seconds = 0.0 if choice.first_token is None else last - choice.first_token
        tokens = choice.completion_tokens
        return {
            "id": choice.context.request_id.value,
            "tenant": self.tenant,
            "path": choice.request.request_path,
            "received": self.received,
            "state": state,
            "prompt_tokens": choice.prompt_tokens,
            "cached_tokens": choice.cached_tokens,
            "completion_tokens": tokens,
            "tokens_per_second": round((tokens - 1) / seconds, 2) if tokens > 1 and seconds > 0 else None,
            "queued_seconds": None if choice.queued is None else round(choice.queued, 4),
            "first_token_seconds": _since(choice.submitted, choice.first_token),
            "seconds": _since(choice.submitted, choice.last_token),
            "finish": None if choice.finish is None else choice.finish.kind,
        }


class RequestTable:
    """An observer of generations that keeps the open ones, and rows of the latest that ended."""

    def __init__(self) -> None:
        self._open: dict[int, _Entry] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=MOST_ENDED)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of open answers, newest first, then of ended ones."""
        self._open = {key: entry for key, entry in self._open.items() if entry.choice is not None}
        found = [(entry, entry.choice) for entry in reversed(self._open.values())]
        now = [entry.row(_state(choice), choice) for entry, choice in found if choice is not None]
        return [*now, *reversed(self._ended)]

    def received(self, path: str) -> None:
        """A request is shown once it is validated."""

    def left(self, path: str) -> None:
        """It was not shown."""

    def started(self, choice: Choice) -> None:
        if len(self._open) >= 2 * MOST_ENDED:
            # One whose end was not reported stays here until its choice is gone.
            self._open = {key: entry for key, entry in self._open.items() if entry.choice is not None}
        self._open[id(choice)] = _Entry(choice)

    def tokens(self, choice: Choice, count: int, since_last: float) -> None:
        """The choice counts its tokens."""

    def finished(self, choice: Choice) -> None:
        self._end(choice, "ended")

    def abandoned(self, choice: Choice) -> None:
        self._end(choice, "client left")

    def _end(self, choice: Choice, state: str, error: str | None = None) -> None:
        entry = self._open.pop(id(choice), None)
        if entry is not None:
            row = entry.row(state, choice)
            self._ended.append(row if error is None else row | {"finish": error})

    def choice_failed(self, choice: Choice, error: RequestFailed) -> None:
        self._end(choice, "failed", str(error.kind))

    def texts_submitted(self, shot: OneShot) -> None:
        """One-shot requests have no decisions to show."""

    def texts_pooled(self, shot: OneShot) -> None:
        """One-shot requests have no decisions to show."""

    def texts_abandoned(self, shot: OneShot) -> None:
        """One-shot requests have no decisions to show."""

    def texts_failed(self, shot: OneShot, error: RequestFailed) -> None:
        """One-shot requests have no decisions to show."""

    def image(self, seconds: float) -> None:
        """Images belong to no row."""

    def clip(self, seconds: float, took: float) -> None:
        """Clips of sound belong to no row."""

    def failed(self, path: str, error: RequestFailed) -> None:
        """A request that was refused has no row, and one that failed later has it."""


def request_routes(table: RequestTable) -> list[Route]:
    """GET /live/requests and GET /live/requests/ID, for operators."""

    async def show(call: Call) -> Response:
        return _json({"replica": call.server.engine.replica, "requests": table.rows()})

    async def why(call: Call) -> Response:
        wanted = call.path_params["request_id"]
        lines: list[str] = []
        try:
            for state in call.server.models:
                lines += await state.engine.questions.decisions(wanted)
        except TimeoutError:
            raise RequestFailed(
                ErrorKind.UNAVAILABLE, "the scheduler does not answer", retry_after=RETRY_AFTER_SECONDS
            ) from None
        return _json({"id": wanted, "lines": lines})

    shown = Document("Open requests of this replica, and the latest that ended", "health")
    asked = Document("The decisions about the requests whose id begins so, as `tokenyard why` shows them", "health")
    return [
        endpoint("/live/requests", operators_only(show), render_error, ("GET",), shown),
        endpoint("/live/requests/{request_id:path}", operators_only(why), render_error, ("GET",), asked),
    ]


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json", headers={"cache-control": "no-store"})


def _state(choice: Choice) -> str:
    if choice.first_token is not None:
        return "running"
    return "waiting" if choice.queued is None else "reading the prompt"


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 4)
