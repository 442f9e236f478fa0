"""A collector of OpenTelemetry's traces and metrics: an HTTP server that reads OTLP's protobuf, as a real one does."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """One span, with ids in hexadecimal and times in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[dict[str, Any]]
    status: tuple[int, str]
    resource: dict[str, Any]
    trace_state: str


@dataclass
class Collector:
    """`status` is what exports are answered with. `headers` are those of the last export."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    # The last points of each histogram: their counts and sums, with attributes.
    histograms: dict[str, list[tuple[int, float, dict[str, Any]]]] = field(default_factory=dict)
    exports: int = 0

    def wait(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Until the condition holds; fails otherwise."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the collector has waited in vain, with {self.spans}"
            time.sleep(0.01)

    def wait_for(self, name: str, count: int = 1) -> list[Span]:
        """The spans of this name, once there are so many."""
        self.wait(lambda: sum(span.name == name for span in self.spans) >= count)
        return [span for span in self.spans if span.name == name]

    def children(self, span: Span) -> list[Span]:
        """The spans below one, in the order of their beginnings."""
        return sorted((one for one in self.spans if one.parent == span.span_id), key=lambda one: one.start)


@contextmanager
def collecting() -> Iterator[Collector]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers = {name.lower(): value for name, value in self.headers.items()}
            collector.exports += 1
            right = (
                self.path in ("/v1/traces", "/v1/metrics") and self.headers["content-type"] == "application/x-protobuf"
            )
            status = collector.status if right else 404
            if status == 200 and self.path == "/v1/metrics":
                collector.histograms |= _histograms(ExportMetricsServiceRequest.FromString(body))
            elif status == 200:
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Tests print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def _spans(request: Any) -> Iterator[Span]:
    for resource in request.resource_spans:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    [_attributes(event.attributes) for event in span.events],
                    (span.status.code, span.status.message),
                    about,
                    span.trace_state,
                )


def _histograms(request: Any) -> dict[str, list[tuple[int, float, dict[str, Any]]]]:
    return {
        metric.name: [(point.count, point.sum, _attributes(point.attributes)) for point in metric.histogram.data_points]
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
