"""Sends spans of ended requests to a collector: from a bounded queue, in a thread, and never in a request's way.

A request that ends adds one record here. Nothing runs while the queue is empty. Records that find it full, and those
that the collector does not take, are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanKind, set_span_in_context

from api_server.release import release
from api_server.trace_context import SAMPLED, TraceContext
from api_server.tracing import names
from api_server.tracing.daemon_call import daemon_call
from api_server.tracing.ids import random_span_id, random_trace_id
from api_server.tracing.library_log import LibraryLog
from api_server.tracing.records import Record
from api_server.tracing.resource import resource
from api_server.tracing.spans import SpanMaker, context_of
from interfaces import Decision
from shared.otel_settings import OtelSettings

log = logging.getLogger("tokenyard")

# Asks the schedulers for the decisions about requests. TimeoutError when one does not answer.
Recall = Callable[[Sequence[str]], Awaitable[Sequence[Decision]]]
# Counts requests as "sent" or "dropped".
Count = Callable[[str, int], None]

# Seconds between two lines about dropped requests.
SECONDS_BETWEEN_COMPLAINTS = 60.0
# Requests whose decisions are asked for at once: a scheduler's steps wait while it answers, one to eight milliseconds.
ASKED_AT_ONCE = 32
# Seconds that the end of a process waits for its last spans.
SECONDS_TO_END = 3.0


class Exporter:
    """The sampler and the queue of one API process. Endpoint and sampler are those of the OTEL_* variables."""

    def __init__(self, settings: OtelSettings, recall: Recall, count: Count) -> None:
        self._settings = settings
        self._recall = recall
        self._count = count
        self._provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        scope = InstrumentationScope(names.SCOPE, release())
        self._maker = SpanMaker(self._provider.resource, scope, settings.latest_names)
        self._library = LibraryLog()
        self._sender = OTLPSpanExporter()
        self._waiting: deque[Record] = deque()
        self._some = asyncio.Event()
        self._many = asyncio.Event()
        self._ending = False
        self._dropped = 0
        self._complained = float("-inf")
        self._running = asyncio.create_task(self._run())

    def begin(self, caller: TraceContext | None) -> TraceContext:
        """The span of a request that has come; its caller and the sampler decide whether it is recorded."""
        trace_id = f"{random_trace_id():032x}" if caller is None else caller.trace_id
        around = None if caller is None else set_span_in_context(NonRecordingSpan(context_of(caller, remote=True)))
        found = self._provider.sampler.should_sample(around, int(trace_id, 16), names.SCOPE, SpanKind.SERVER)
        flags = SAMPLED if found.decision.is_sampled() else 0
        state = "" if caller is None else caller.state
        return TraceContext(trace_id, f"{random_span_id():016x}", flags, state, made_here=True)

    def add(self, record: Record) -> None:
        """Take an ended request, or drop it when too many wait."""
        if len(self._waiting) >= self._settings.most_waiting:
            self._drop(1, "too many requests wait for their export")
            return
        self._waiting.append(record)
        self._some.set()
        if len(self._waiting) >= min(self._settings.batch, self._settings.most_waiting):
            self._many.set()

    async def close(self) -> None:
        """Send what waits, for a bounded time, and end."""
        self._ending = True
        self._some.set()
        self._many.set()
        await asyncio.wait([self._running], timeout=SECONDS_TO_END)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._drop(len(self._waiting), "the process ends")
        self._sender.shutdown()
        self._library.close()

    async def _run(self) -> None:
        while self._waiting or not self._ending:
            await self._some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.delay):
                    await self._many.wait()
            if self._waiting:
                await self._send()

    async def _send(self) -> None:
        """Send a batch of those that wait."""
        count = min(self._settings.batch, len(self._waiting))
        records = [self._waiting.popleft() for _ in range(count)]
        if not self._waiting and not self._ending:
            self._some.clear()
        if len(self._waiting) < self._settings.batch and not self._ending:
            self._many.clear()
        try:
            decisions = await self._decisions(records)
            refusal = await daemon_call(lambda: self._export(records, decisions))
        except asyncio.CancelledError:
            self._drop(count, "the process ends")
            raise
        except Exception as error:  # whatever a library raises, requests go on
            self._drop(count, f"{type(error).__name__}: {error}")
            return
        if refusal:
            self._drop(count, f"the collector did not take them: {refusal}")
        else:
            self._count("sent", count)

    async def _decisions(self, records: Sequence[Record]) -> list[list[Decision]]:
        """The decisions about each of the requests. Spans without them are better than none."""
        asked = [number for number, record in enumerate(records) if record.served]
        found: list[list[Decision]] = [[] for _ in records]
        for start in range(0, len(asked), ASKED_AT_ONCE):
            part = asked[start : start + ASKED_AT_ONCE]
            try:
                decisions = await self._recall([records[number].request_id for number in part])
            except TimeoutError:
                break
            for decision in decisions:
                if 0 <= decision.request < len(part):
                    found[part[decision.request]].append(decision)
        return found

    def _export(self, records: Sequence[Record], decisions: Sequence[Sequence[Decision]]) -> str:
        """Make the spans and send them, in the thread. Returns why the collector did not take them, or ""."""
        pairs = zip(records, decisions, strict=True)
        spans = [span for record, about in pairs for span in self._maker.spans(record, about)]
        self._library.take()
        if self._sender.export(spans) == SpanExportResult.SUCCESS:
            return ""
        return self._library.take() or "the exporter gives no reason"

    def _drop(self, count: int, why: str) -> None:
        if not count:
            return
        self._count("dropped", count)
        self._dropped += count
        if time.monotonic() - self._complained >= SECONDS_BETWEEN_COMPLAINTS:
            self._complained = time.monotonic()
            log.warning("spans of %d requests are dropped so far: %s", self._dropped, why)
