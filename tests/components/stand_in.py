"""Servers of a test's own, where only the proxy in front of them is tested: full ones, and one that notes who comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Seconds for which a request is held at most.
HELD_SECONDS = 60.0


@dataclass
class StandIn:
    """Answers all that is posted alike; `/ready` is always well."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    # The header x-session-id of each request, or its body where it has none.
    seen: list[str] = field(default_factory=list)
    # Requests are answered while it is set.
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def standing_in(status: int, **headers: str) -> Iterator[StandIn]:
    """Serve as one on a port of its own."""
    stand_in = StandIn(status, {name.replace("_", "-"): value for name, value in headers.items()})
    stand_in.released.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            stand_in.seen.append(self.headers["x-session-id"] or body.decode())
            stand_in.released.wait(HELD_SECONDS)
            self._answer(stand_in.status, stand_in.headers)

        def _answer(self, status: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        # Connections that wait: with the usual five the proxy's checks would fail beside many requests.
        request_queue_size = 128

    with Listener(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        stand_in.port = listener.server_port
        try:
            yield stand_in
        finally:
            stand_in.released.set()
            listener.shutdown()
            thread.join()
