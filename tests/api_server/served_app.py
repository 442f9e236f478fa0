"""A web server on the loopback address that answers with any bytes at any pace, true or not."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Page = Callable[[], Iterable[bytes | float]]
"""What is sent: bytes as they are, and seconds to wait."""


class Web(socketserver.ThreadingTCPServer):
    """`pages` by their paths; `heads` are the requests that came."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.pages: dict[str, Page] = {}
        self.heads: list[str] = []
        self.broken = threading.Event()
        """Somebody has gone away before the end of a page."""
        self.called = threading.Event()
        self.open = self.most_open = 0
        self._tls = tls
        self._scheme = "https" if tls else "http"
        super().__init__((address, 0), _Visit)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"{self._scheme}://{host}:{self.port}{path}"

    def get_request(self) -> tuple[Any, Any]:
        plain, address = super().get_request()
        plain.settimeout(20)
        return (self._tls.wrap_socket(plain, server_side=True) if self._tls else plain), address

    def handle_error(self, *_: Any) -> None:
        """Clients break off here on purpose."""


class _Visit(socketserver.BaseRequestHandler):
    server: Web

    def handle(self) -> None:
        web = self.server
        head = b""
        while b"\r\n\r\n" not in head:
            chunk = self.request.recv(65536)
            if not chunk:
                return
            head += chunk
        web.heads.append(head.decode())
        web.called.set()
        page = web.pages[head.split()[1].decode().partition("?")[0]]
        web.open += 1
        web.most_open = max(web.open, web.most_open)
        try:
            for part in page():
                self._sleep(part) if isinstance(part, float) else self.request.sendall(part)
        except OSError:
            web.broken.set()
        finally:
            web.open -= 1

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.request.settimeout(0.02)
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                if not self.request.recv(1):
                    raise ConnectionResetError


def answer(body: bytes, *headers: str, status: str = "200 OK") -> Page:
    """A whole and true answer."""
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return lambda: ["\r\n".join(lines).encode() + body]


def redirect(to: str, status: int = 302) -> Page:
    return answer(b"", f"Location: {to}", "Set-Cookie: session=1", status=f"{status} Elsewhere")


@contextlib.contextmanager
def running(web: Web) -> Iterator[Web]:
    thread = threading.Thread(target=lambda: web.serve_forever(0.02), daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.shutdown()
        web.server_close()
        thread.join(60)
