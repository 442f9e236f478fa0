"""Programs that leave a server running share the one of the embedded model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.system.server import Server


@pytest.fixture(scope="session")
def server(embedded: Server) -> Server:
    return embedded


class Busy(BaseHTTPRequestHandler):
    """A server whose queue is full, in SGLang's dialect; `/ready` says nothing of that."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(503)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def busy() -> Iterator[int]:
    """The port of one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield listener.server_port
        finally:
            listener.shutdown()
            thread.join()
