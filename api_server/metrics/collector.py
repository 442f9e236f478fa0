"""The request figures of this server, one set for all dialects and all API replicas.

Each replica keeps its counters in a file of the run directory (prometheus_client's multiprocess mode), so that the
scraped replica answers for all of them, dead ones included. Facts of the scheduler and of the processes come at scrape
time from `server_facts.py`. Knows the figures and when they are taken; the names that other servers' dashboards use
for them are in `aliases.py`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api_server.answers.choice import Choice
from api_server.answers.one_shot import OneShot, Sound
from api_server.dialects.openai.errors import render_error
from api_server.errors import RequestFailed
from api_server.metrics.aliases import aliases
from api_server.metrics.files import shared_directory
from api_server.metrics.server_facts import ModelState, facts_of_models, process_facts
from api_server.metrics.usage import MOST_SHOWN, key_families
from api_server.outcomes import Outcome, outcome_of
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import Status
from shared.process_table import ProcessState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds of durations of a whole request: 1 ms to 600 s, four a decade.
SECONDS = tuple(round(base * 10.0**power, 6) for power in range(-3, 3) for base in (1, 2, 3.5, 6))

# Bounds of the time of one token: 0.1 ms to 6 s.
TOKEN_SECONDS = tuple(round(base * 10.0**power, 7) for power in range(-4, 1) for base in (1, 2, 3.5, 6))

# Seconds for which figures are gathered before they are written where other replicas read them.
WRITE_SECONDS = 0.1

LENGTHS = tuple(float(1 << power) for power in range(21))


class _Tally:
    """A shared counter, and the amount that is not yet added to it."""

    __slots__ = ("_counter", "amount")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.amount: float = 0

    def write(self) -> None:
        if self.amount:
            self._counter.inc(self.amount)
            self.amount = 0


class _TalliedHistogram(Histogram):
    """A histogram that takes many observations in one go: a write per bucket that was hit, and one for the sum."""

    def tallied(self) -> Self:
        """The histogram itself, ready for `note`."""
        self._counts = [0] * len(self._upper_bounds)
        self._total = 0.0
        return self

    def note(self, value: float, count: int = 1) -> None:
        """Notes `count` observations of `value` for the next `write`."""
        self._counts[bisect_left(self._upper_bounds, value)] += count
        self._total += value * count

    def write(self) -> None:
        for bucket, count in enumerate(self._counts):
            if count:
                self._buckets[bucket].inc(count)
                self._counts[bucket] = 0
        if self._total:
            self._sum.inc(self._total)
            self._total = 0.0


class Metrics:
    """The counters of this replica (an `Observer`), and the exposition for all replicas.

    Events are added up in plain numbers, which `write` adds to the shared counters: a tenth of a second after the
    first of them, at a scrape, and when the server ends. PROMETHEUS_MULTIPROC_DIR names where replicas keep their
    counters, from before prometheus_client is imported; without it this process counts alone. `routes` are the paths
    that generate or pool: errors of others are not counted.
    """

    def __init__(self, model_name: str, routes: Collection[str]) -> None:
        self._model_name = model_name
        self._directory = shared_directory()
        self._routes = frozenset(routes)
        self._own = own = CollectorRegistry()
        self._requests = Counter(
            "tokenyard_requests", "Answers that ended, and requests that failed", ["route", "outcome"], registry=own
        )
        self._received = Counter(
            "tokenyard_requests_received", "Requests for generation or pooling", ["route"], registry=own
        )
        answers = Counter("tokenyard_answers", "Answers by their finish reason", ["finished_reason"], registry=own)
        self._answers_by = {reason: _Tally(answers.labels(reason)) for reason in ("stop", "length", "abort")}
        self._ended_by: dict[tuple[str, str], _Tally] = {}
        self._received_by: dict[str, _Tally] = {}
        self._prompt_tokens = _Tally(Counter("tokenyard_prompt_tokens", "Prompt tokens submitted", registry=own))
        self._generation_tokens = _Tally(Counter("tokenyard_generation_tokens", "Tokens generated", registry=own))
        self._cached_tokens = _Tally(
            Counter("tokenyard_cached_prompt_tokens", "Prompt tokens that came from the prefix cache", registry=own)
        )
        self._pooled_texts = _Tally(
            Counter("tokenyard_pooled_texts", "Texts whose vectors or scores were computed", registry=own)
        )
        self._refused_connections = _Tally(
            Counter("tokenyard_connections_refused", "Connections beyond the limit of open files", registry=own)
        )
        self._images = _Tally(Counter("tokenyard_images", "Images of requests", registry=own))
        self._cached_images = _Tally(
            Counter("tokenyard_cached_images", "Images of requests that came from the cache of images", registry=own)
        )
        self._audio_seconds = _Tally(
            Counter("tokenyard_audio_seconds", "Seconds of sound that requests had", registry=own)
        )
        self._painted_images = _Tally(
            Counter("tokenyard_painted_images", "Images that were painted for requests", registry=own)
        )
        self._painted_pixels = _Tally(
            Counter("tokenyard_painted_pixels", "Pixels of the images that were painted", registry=own)
        )
        traced = Counter(
            "tokenyard_traced_requests", "Requests whose spans were sent or dropped", ["outcome"], registry=own
        )
        self._traced = {outcome: _Tally(traced.labels(outcome)) for outcome in ("sent", "dropped")}
        self._totals = (
            self._audio_seconds,
            self._painted_images,
            self._painted_pixels,
            self._prompt_tokens,
            self._generation_tokens,
            self._cached_tokens,
            self._pooled_texts,
            self._refused_connections,
            self._images,
            self._cached_images,
            *self._traced.values(),
        )
        self._histograms: list[_TalliedHistogram] = []
        self._validation = self._histogram("request_validation_seconds", "Arrival to submission", SECONDS)
        self._wait = self._histogram(
            "request_wait_seconds", "Submission to the first token: queue and prefill", SECONDS
        )
        self._queue = self._histogram("queue_time_seconds", "Arrival in the scheduler to a place on a worker", SECONDS)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to the first token (TTFT)", SECONDS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens of one request (ITL)", TOKEN_SECONDS)
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "First to last token, per token after the first (TPOT)", TOKEN_SECONDS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the last token of an answer", SECONDS)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt length of an answer", LENGTHS)
        self._generation_length = self._histogram("request_generation_tokens", "Length of an answer", LENGTHS)
        self._image_seconds = self._histogram(
            "image_processing_seconds", "Bytes of an image to its arrays, with the wait for a process", SECONDS
        )
        self._sound_seconds = self._histogram("speech_audio_seconds", "Seconds of sound of a spoken request", SECONDS)
        self._first_sound = self._histogram(
            "time_to_first_audio_seconds", "Arrival to the first samples of a spoken request", SECONDS
        )
        self._real_time_factor = self._histogram(
            "speech_real_time_factor", "Seconds from submission to the last sample, for each second of sound", SECONDS
        )
        self._clip_seconds = self._histogram(
            "audio_processing_seconds", "Bytes of a sound file to its features, with the wait for a process", SECONDS
        )
        self._painting_seconds = self._histogram(
            "painting_seconds", "Seconds from submission to the last image of a request", SECONDS
        )
        self._due: asyncio.TimerHandle | None = None

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> _TalliedHistogram:
        made = _TalliedHistogram("tokenyard_" + name, documentation, buckets=buckets, registry=self._own).tallied()
        self._histograms.append(made)
        return made

    def exposition(
        self,
        status: Status | None,
        silence: float = 0.0,
        draining: bool = False,
        processes: Mapping[str, ProcessState] = MappingProxyType({}),
        others: Sequence[ModelState] = (),
        further: Iterable[Metric] = (),
    ) -> bytes:
        """The text that GET /metrics answers. The scheduler's last `status` is `silence` seconds old.

        `others` are the further models, and `further` are families that are shown as they are.
        """
        self.write()
        models = [ModelState(self._model_name, status, silence), *others]
        facts = [*facts_of_models(models, draining), *process_facts(processes), *further]
        return generate_latest(_Everything(self._families(), facts, self._model_name))

    def received(self, path: str) -> None:
        tally = self._received_by.get(path)
        if tally is None:
            tally = self._received_by[path] = _Tally(self._received.labels(path))
        tally.amount += 1
        self._write_soon()

    def left(self, path: str) -> None:
        self._count(path, Outcome.CANCELLED)

    def started(self, choice: Choice) -> None:
        self._prompt_tokens.amount += choice.prompt_tokens
        self._write_soon()

    def tokens(self, choice: Choice, count: int, since_last: float) -> None:
        self._generation_tokens.amount += count
        if choice.completion_tokens:  # else these are the first ones: their wait is the TTFT
            self._itl.note(since_last / count, count)
        self._write_soon()

    def finished(self, choice: Choice) -> None:
        kind = "" if choice.finish is None else choice.finish.kind
        aborted = kind == "cancelled"
        self._answers_by["abort" if aborted else "length" if kind == "length" else "stop"].amount += 1
        self._count(choice.request.request_path, Outcome.CANCELLED if aborted else Outcome.OK)
        self._note_times(choice)
        self._note_lengths(choice)

    def abandoned(self, choice: Choice) -> None:
        self._answers_by["abort"].amount += 1
        self._count(choice.request.request_path, Outcome.CANCELLED)
        self._note_lengths(choice)

    def choice_failed(self, choice: Choice, error: RequestFailed) -> None:
        """`failed` counts its request."""

    def texts_submitted(self, shot: OneShot) -> None:
        self._prompt_tokens.amount += shot.tokens
        self._validation.note(shot.submitted - shot.received)
        self._write_soon()

    def texts_pooled(self, shot: OneShot) -> None:
        self._count(shot.path, Outcome.OK)
        if shot.pictures is None:
            self._pooled_texts.amount += shot.texts
            self._generation_tokens.amount += shot.generated
        else:
            self._painted_images.amount += shot.pictures.count
            self._painted_pixels.amount += shot.pictures.count * shot.pictures.pixels
        self._prompt_length.note(shot.tokens)
        if shot.ended is not None:
            self._e2e.note(shot.ended - shot.received)
            if shot.sound is not None:
                self._note_sound(shot, shot.sound, shot.ended)
            if shot.pictures is not None:
                self._painting_seconds.note(shot.ended - shot.submitted)

    def texts_abandoned(self, shot: OneShot) -> None:
        self._generation_tokens.amount += shot.generated
        self._count(shot.path, Outcome.CANCELLED)

    def clip(self, seconds: float, took: float) -> None:
        self._audio_seconds.amount += seconds
        self._clip_seconds.note(took)

    def texts_failed(self, shot: OneShot, error: RequestFailed) -> None:
        """`failed` counts its request."""

    def image(self, seconds: float) -> None:
        self._images.amount += 1
        if seconds:
            self._image_seconds.note(seconds)
        else:
            self._cached_images.amount += 1
        self._write_soon()

    def failed(self, path: str, error: RequestFailed) -> None:
        if path in self._routes:
            self._count(path, outcome_of(error.kind))

    def connection_refused(self) -> None:
        """Counts a connection refused for want of a file descriptor."""
        self._refused_connections.amount += 1
        self._write_soon()

    def traced(self, outcome: str, count: int) -> None:
        """Counts requests whose spans were sent or dropped."""
        self._traced[outcome].amount += count
        self._write_soon()

    def write(self) -> None:
        """Adds the pending amounts to the shared counters."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for tally in (*self._received_by.values(), *self._ended_by.values(), *self._answers_by.values(), *self._totals):
            tally.write()
        for histogram in self._histograms:
            histogram.write()

    def _write_soon(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(WRITE_SECONDS, self.write)

    def _count(self, path: str, outcome: str) -> None:
        tally = self._ended_by.get((path, outcome))
        if tally is None:
            tally = self._ended_by[path, outcome] = _Tally(self._requests.labels(path, outcome))
        tally.amount += 1
        self._write_soon()

    def _note_sound(self, shot: OneShot, sound: Sound, ended: float) -> None:
        self._sound_seconds.note(sound.seconds)
        if sound.first is not None:
            self._first_sound.note(sound.first - shot.received)
        if sound.seconds:
            self._real_time_factor.note((ended - shot.submitted) / sound.seconds)

    def _note_times(self, choice: Choice) -> None:
        received = choice.request.received
        first = choice.first_token
        last = choice.last_token
        self._validation.note(choice.submitted - received)
        if choice.queued is not None:
            self._queue.note(choice.queued)
        if first is None or last is None:
            return
        self._wait.note(first - choice.submitted)
        self._ttft.note(first - received)
        self._e2e.note(last - received)
        if choice.completion_tokens > 1:
            self._tpot.note((last - first) / (choice.completion_tokens - 1))

    def _note_lengths(self, choice: Choice) -> None:
        self._prompt_length.note(choice.prompt_tokens)
        self._generation_length.note(choice.completion_tokens)
        self._cached_tokens.amount += choice.cached_tokens

    def _families(self) -> Iterable[Metric]:
        if self._directory is None:
            return list(self._own.collect())
        collector: Any = MultiProcessCollector  # the library leaves it untyped
        return cast(list[Metric], collector(None, self._directory).collect())


def generation_paths(routes: Iterable[BaseRoute]) -> list[str]:
    """The paths that generate, pool or hear. Requests to other paths are not counted."""
    documents = ((route, getattr(getattr(route, "endpoint", None), "document", None)) for route in routes)
    return [route.path for route, found in documents if isinstance(route, Route) and found and found.computes]


def metrics_route(metrics: Metrics) -> Route:
    """GET /metrics."""

    async def show(call: Call) -> Response:
        server = call.server
        engine = server.engine
        others = [ModelState(other.model_name, other.engine.status, other.engine.silence) for other in server.others]
        server.accounts.write()
        rows = await asyncio.to_thread(server.accounts.ledger.largest, MOST_SHOWN) if server.keys.users else []
        uses = key_families(rows) if server.keys.users else ()
        text = metrics.exposition(engine.status, engine.silence, engine.draining, server.processes, others, uses)
        return Response(text, media_type=CONTENT_TYPE)

    return endpoint("/metrics", show, render_error, ("GET",), Document("Prometheus metrics of all replicas", "health"))


@dataclass(frozen=True)
class _Everything:
    """A collector of one scrape: our families, then the same figures under other servers' names."""

    requests: Iterable[Metric]
    scheduler: Iterable[Metric]
    model_name: str

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in (*self.requests, *self.scheduler)}
        yield from families.values()
        yield from aliases(families, self.model_name)
