"""OpenTelemetry's metrics of servers of generative AI: durations of requests and waits for tokens.

An observer of generations: a request costs three notes, when it has ended. The SDK adds them up and sends sums in a
thread of its own, at an interval, so what a collector does not take is part of the next sums, and nothing grows.
"""

from __future__ import annotations

import asyncio
import time

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from api_server.answers.choice import Choice
from api_server.answers.one_shot import OneShot
from api_server.errors import RequestFailed
from api_server.release import release
from api_server.tracing import names
from api_server.tracing.daemon_call import daemon_call
from api_server.tracing.library_log import MetricsLog
from api_server.tracing.resource import resource
from shared.otel_settings import OtelMetricsSettings

# Seconds that the end of a process waits for its last sums.
SECONDS_TO_END = 3.0

# Bounds of the histograms, in seconds, as the conventions have them.
_OF_REQUESTS = [0.01 * 2**power for power in range(14)]
_TO_FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_BY_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]


class OtelMetrics:
    """The histograms of one API process."""

    def __init__(self, settings: OtelMetricsSettings) -> None:
        self._library = MetricsLog()
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(),
            export_interval_millis=settings.interval * 1000,
            export_timeout_millis=SECONDS_TO_END * 1000,
        )
        self._provider = MeterProvider([reader], resource(), shutdown_on_exit=False)
        meter = self._provider.get_meter(names.SCOPE, release())

        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "Requests", explicit_bucket_boundaries_advisory=_OF_REQUESTS
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "First tokens",
            explicit_bucket_boundaries_advisory=_TO_FIRST_TOKEN,
        )
        self._token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Other tokens", explicit_bucket_boundaries_advisory=_BY_TOKEN
        )
        self._provider_name = {names.provider(settings.latest_names): names.PROVIDER}

    async def close(self) -> None:
        """Send the last sums, for a bounded time."""
        ending = asyncio.create_task(daemon_call(self._provider.shutdown))
        await asyncio.wait([ending], timeout=SECONDS_TO_END)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        self._library.close()

    def received(self, path: str) -> None:
        """Nothing is measured before a request is validated."""

    def left(self, path: str) -> None:
        """Nothing was measured."""

    def started(self, choice: Choice) -> None:
        """It is measured when it ends."""

    def tokens(self, choice: Choice, count: int, since_last: float) -> None:
        """They are measured when their answer ends."""

    def finished(self, choice: Choice) -> None:
        self._note(choice, {})

    def abandoned(self, choice: Choice) -> None:
        self._note(choice, {names.ERROR_TYPE: "cancelled"})

    def choice_failed(self, choice: Choice, error: RequestFailed) -> None:
        self._note(choice, {names.ERROR_TYPE: str(error.kind)})

    def texts_submitted(self, shot: OneShot) -> None:
        """They are measured when they end."""

    def texts_pooled(self, shot: OneShot) -> None:
        self._note_shot(shot, {})

    def texts_abandoned(self, shot: OneShot) -> None:
        self._note_shot(shot, {names.ERROR_TYPE: "cancelled"})

    def texts_failed(self, shot: OneShot, error: RequestFailed) -> None:
        self._note_shot(shot, {names.ERROR_TYPE: str(error.kind)})

    def image(self, seconds: float) -> None:
        """Images have no place in these metrics."""

    def clip(self, seconds: float, took: float) -> None:
        """Clips of sound have no place in these metrics."""

    def failed(self, path: str, error: RequestFailed) -> None:
        """A request that was refused has no duration. What failed later has been measured."""

    def _note(self, choice: Choice, more: dict[str, str]) -> None:
        about = {names.OPERATION: "chat" if choice.request.messages else "text_completion"}
        about |= self._model(choice.model) | more
        self._duration.record(time.monotonic() - choice.submitted, about)
        if choice.first_token is None:
            return
        self._first_token.record(choice.first_token - choice.submitted, about)
        if choice.completion_tokens > 1 and choice.last_token is not None:
            self._token.record((choice.last_token - choice.first_token) / (choice.completion_tokens - 1), about)

    def _note_shot(self, shot: OneShot, more: dict[str, str]) -> None:
        about = {names.OPERATION: names.operation(shot.path)} | self._model(shot.model) | more
        self._duration.record(time.monotonic() - shot.received, about)

    def _model(self, name: str) -> dict[str, str]:
        return self._provider_name | {names.REQUEST_MODEL: name, names.RESPONSE_MODEL: name}
