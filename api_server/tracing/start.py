"""Begins traces and metrics if the environment asks for them. The extra's packages are imported only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from api_server.engine.client import EngineClient
from interfaces import Decision
from shared.otel_settings import OtelMetricsSettings, OtelSettings

if TYPE_CHECKING:
    from api_server.tracing.exporter import Exporter
    from api_server.tracing.otel_metrics import OtelMetrics


@dataclass(frozen=True)
class Tracing:
    """The application with its traces, and their exporter; None without traces."""

    application: ASGIApp
    exporter: Exporter | None = None

    async def close(self) -> None:
        """Sends the last spans, for a bounded time."""
        if self.exporter is not None:
            await self.exporter.close()


def traced(
    application: ASGIApp,
    settings: OtelSettings | None,
    engines: Sequence[EngineClient],
    count: Callable[[str, int], None],
) -> Tracing:
    """Wraps the application in its traces, if there are to be any. `count` counts requests as "sent" or "dropped"."""
    if settings is None:
        return Tracing(application)
    from api_server.tracing.exporter import Exporter
    from api_server.tracing.middleware import Traced

    async def recall(request_ids: Sequence[str]) -> list[Decision]:
        answers = await asyncio.gather(*(engine.questions.recall(request_ids) for engine in engines))
        return [decision for answer in answers for decision in answer]

    exporter = Exporter(settings, recall, count)
    return Tracing(Traced(application, exporter), exporter)


def measured(settings: OtelMetricsSettings | None) -> OtelMetrics | None:
    """The observer that sends metrics, if there are to be any."""
    if settings is None:
        return None
    from api_server.tracing.otel_metrics import OtelMetrics

    return OtelMetrics(settings)
