"""Limits on the head of a request: its size and its form, so that no two readers see different requests in it.

The parser refuses most malformed heads. Those that it accepts, or might accept in another version, are refused here.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import orjson

# Request line and headers together. Codex keeps its state in headers of up to 100 kB; proxies send much less.
MAX_HEAD_BYTES = 128 * 1024

# The longest URL that the parser can count.
MAX_URL_BYTES = 65_535

MAX_HEADERS = 256

# Bytes of a Host header: names, addresses and ports.
_IN_HOSTS = string.ascii_letters.encode() + string.digits.encode() + b".-_~!$&'()*+,;=%:[]"


class Refused(Exception):
    """An unreadable request. The connection ends with this answer; `reason` is written for the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def check(version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Checks that the target and the end of a request are unambiguous. Names are in lower case. Raises Refused."""
    if version not in ("1.0", "1.1"):
        raise Refused(505, f"HTTP/{version} is not served; use HTTP/1.1")
    if len(url) > MAX_URL_BYTES:
        raise Refused(414, f"the URL is longer than {MAX_URL_BYTES} bytes")
    check_count(headers)
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    codings = names.count(b"transfer-encoding")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise Refused(400, f"{hosts} Host headers were sent; HTTP/1.1 wants one")
    if hosts and headers[names.index(b"host")][1].strip().translate(None, _IN_HOSTS):
        raise Refused(400, "Host: must be a name or an address, and perhaps a port")
    if names.count(b"content-length") + codings > 1:
        raise Refused(400, "the length of the body is given twice; send one Content-Length, or Transfer-Encoding")
    if codings and headers[names.index(b"transfer-encoding")][1].strip().lower() != b"chunked":
        raise Refused(400, "Transfer-Encoding: only `chunked` is read")
    if codings and version == "1.0":
        raise Refused(400, "Transfer-Encoding: HTTP/1.0 has none; send a Content-Length, or use HTTP/1.1")


def check_count(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Checks the number of headers, also of an incomplete head. Raises Refused."""
    if len(headers) > MAX_HEADERS:
        raise Refused(431, f"more than {MAX_HEADERS} headers were sent")


def answer(refused: Refused, status_line: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The whole answer; it ends the connection. Its form is that of OpenAI's errors, as for paths of no dialect."""
    kind = "server_error" if refused.status == 503 else "invalid_request_error"
    error = {"message": refused.reason, "type": kind, "param": None, "code": "bad_http_request"}
    body = orjson.dumps({"error": error})
    lines = [b"%s: %s\r\n" % header for header in headers]
    more = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return b"".join([status_line, *lines, more, body])
