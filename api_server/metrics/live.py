"""GET /live: a few figures of this moment as JSON, for the page at /ui/ and for scripts.

Made from what this API process knows already: the scheduler's last status, the answers that it sees itself, and what
the other API processes have written of theirs. So asking costs the scheduler nothing. Totals count since the start of
a process; the one who asks computes rates.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.routing import Route

from api_server.answers.choice import Choice
from api_server.answers.one_shot import OneShot
from api_server.dialects.openai.errors import render_error
from api_server.engine.client import STALE_SECONDS
from api_server.errors import RequestFailed
from api_server.metrics.replicas import ReplicaFiles
from api_server.pixels.facts import paint_facts
from api_server.release import release
from api_server.state import ServerState
from api_server.web.access import is_operator
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import Status, WorkerStatus

# Waits that percentiles are made of: those of the last seconds, and at most so many.
RECENT_SECONDS = 15.0
MOST_WAITS = 4096


class Waits:
    """The latest waits of one kind, with the time of each."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float]] = deque(maxlen=MOST_WAITS)

    def note(self, seconds: float) -> None:
        self._entries.append((time.monotonic(), seconds))

    def percentiles(self) -> dict[str, float] | None:
        """The p50 and p99 of recent waits in milliseconds; None when there are none."""
        since = time.monotonic() - RECENT_SECONDS
        while self._entries and self._entries[0][0] < since:
            self._entries.popleft()
        if not self._entries:
            return None
        p50, p99 = np.percentile([seconds for _, seconds in self._entries], (50, 99))
        return {"p50": round(float(p50) * 1e3, 3), "p99": round(float(p99) * 1e3, 3)}


class LiveFigures:
    """An observer of generations that counts tokens and keeps the latest waits."""

    def __init__(self, server: ServerState) -> None:
        self._replica = server.engine.replica
        self._since = server.created
        self.generated = 0
        self.prompts = 0
        self.cached = 0
        self.first_token = Waits()
        self.between_tokens = Waits()
        self._files = ReplicaFiles(server.live_folder, self._of_this_process)

    def of_all_processes(self) -> list[dict[str, Any]]:
        """The figures of each API process of this server. Waits that others wrote long ago are not recent ones."""
        latest = time.time() - RECENT_SECONDS
        stale = {"first_token_ms": None, "between_tokens_ms": None}
        return [figures | (stale if figures["time"] < latest else {}) for figures in self._files.all()]

    def totals(self) -> dict[str, int]:
        return {"generated": self.generated, "prompt": self.prompts, "cached": self.cached}

    def _of_this_process(self) -> dict[str, Any]:
        return {
            "replica": self._replica,
            "pid": os.getpid(),
            "time": time.time(),
            "since": self._since,
            "totals": self.totals(),
            "first_token_ms": self.first_token.percentiles(),
            "between_tokens_ms": self.between_tokens.percentiles(),
        }

    def received(self, path: str) -> None:
        """Nothing is counted before a request is validated."""

    def left(self, path: str) -> None:
        """Nothing was counted."""

    def started(self, choice: Choice) -> None:
        self.prompts += choice.prompt_tokens
        self._files.changed()

    def tokens(self, choice: Choice, count: int, since_last: float) -> None:
        self.generated += count
        if choice.completion_tokens:
            self.between_tokens.note(since_last / count)
        else:
            self.first_token.note(since_last)
        self._files.changed()

    def finished(self, choice: Choice) -> None:
        self.cached += choice.cached_tokens
        self._files.changed()

    def abandoned(self, choice: Choice) -> None:
        self.cached += choice.cached_tokens
        self._files.changed()

    def choice_failed(self, choice: Choice, error: RequestFailed) -> None:
        """Its tokens stay counted."""

    def texts_submitted(self, shot: OneShot) -> None:
        self.prompts += shot.tokens
        self._files.changed()

    def texts_pooled(self, shot: OneShot) -> None:
        self.generated += shot.generated
        self._files.changed()

    def texts_abandoned(self, shot: OneShot) -> None:
        """Its tokens stay counted."""

    def texts_failed(self, shot: OneShot, error: RequestFailed) -> None:
        """Its tokens stay counted."""

    def image(self, seconds: float) -> None:
        """Images have no place in these figures."""

    def clip(self, seconds: float, took: float) -> None:
        """Clips of sound have no place in these figures."""

    def failed(self, path: str, error: RequestFailed) -> None:
        """Failures have no place in these figures."""


def live_route(figures: LiveFigures) -> Route:
    """GET /live."""

    async def show(call: Call) -> Response:
        facts = live_facts(call.server, figures, is_operator(call))
        return Response(orjson.dumps(facts), media_type="application/json", headers={"cache-control": "no-store"})

    return endpoint(
        "/live",
        show,
        render_error,
        ("GET",),
        Document("A few figures of this moment, as the page shows them", "health"),
    )


def live_facts(server: ServerState, figures: LiveFigures, operator: bool) -> dict[str, Any]:
    """The answer of /live. What concerns the machine is for operators only."""
    engine = server.engine
    status = engine.status if engine.silence <= STALE_SECONDS else None
    health = server.health
    facts: dict[str, Any] = {
        "time": time.time(),
        "version": release(),
        "replica": engine.replica,
        "model": server.model_name,
        "models": [state.model_name for state in server.models],
        "task": server.task,
        "sees": server.sees,
        "paints": [found for state in server.models if (found := paint_facts(state)) is not None],
        "dtype": server.settings.dtype,
        "operator": operator,
        "ready": health.ready,
        "reason": health.reason,
        "since": server.created,
        "max_model_len": server.max_model_len,
        "totals": figures.totals(),
        "first_token_ms": figures.first_token.percentiles(),
        "between_tokens_ms": figures.between_tokens.percentiles(),
        "scheduler": None if status is None else _of_scheduler(status),
        "replicas": [_public(each) if not operator else each for each in figures.of_all_processes()],
    }
    if operator:
        silent = {name: state.seconds_silent for name, state in server.processes.items() if state.seconds_silent}
        facts["process"] = {"pid": os.getpid(), "cpu_seconds": round(time.process_time(), 2), "silent": silent}
    return facts


def _public(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "pid"}


def _of_scheduler(status: Status) -> dict[str, Any]:
    return {
        "running": status.running,
        "waiting": status.waiting,
        "max_running": status.max_running,
        "block_size": status.block_size,
        "paused": status.paused,
        "counters": {name: count for name, count in status.counters.items() if "<=" not in name},
        "workers": [_of_worker(worker) for worker in status.workers],
    }


def _of_worker(worker: WorkerStatus) -> dict[str, Any]:
    return {
        "index": worker.index,
        "device": worker.device,
        "backend": worker.backend,
        "epoch": worker.epoch,
        "running": worker.running,
        "blocks_used": worker.blocks_used,
        "blocks_total": worker.blocks_total,
        "blocks_cached": worker.blocks_cached,
        "steps": worker.steps,
        "seconds_since_step": round(worker.seconds_since_step, 3),
        "drafted": worker.drafted,
        "accepted": worker.accepted,
    }
