"""Fetches what a client names by URL, from hosts that the operator has listed and nowhere else.

Each hop resolves its host once, judges every address that came back, and connects to those very addresses, so that a
second answer of a name server changes nothing. No cookies, credentials or proxies of the process are sent. It knows no
media type and no dialect. Its messages to clients and its log never contain a path or a query, which may be secrets,
nor an address that a name has led to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import httpx2

from api_server import trace_context
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.release import release
from shared.fetch_hosts import FetchHosts

log = logging.getLogger("tokenyard")

# Returns the addresses of a host, as text, for a port. Raises OSError or UnicodeError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

# Of one document.
MOST_BYTES = 4 * 1024 * 1024
# Addresses of one host that are tried one after the other.
MOST_ADDRESSES = 4
RETRY_AFTER_SECONDS = 2
_REDIRECTS = (301, 302, 303, 307, 308)
_ACCEPT_TEXT = "text/*, application/json, */*;q=0.1"
_HEADERS = {"Accept-Encoding": "gzip", "Connection": "close"}


@dataclass(frozen=True)
class Limits:
    """Limits of one fetch, and of all fetches of one process (`at_once`)."""

    # Time from the call to the last byte, waiting for others and redirects included.
    seconds: float = 10.0
    # Most bytes, on the wire and again after decompression.
    bytes: int = MOST_BYTES
    redirects: int = 4
    at_once: int = 8


@dataclass(frozen=True)
class Fetched:
    body: bytes
    # The server's content type; empty when the server names none.
    content_type: str
    # The last part of the final URL's path; empty when that is a folder.
    name: str


async def system_addresses(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _Refused(Exception):
    """A refused fetch. The message is the end of a sentence about the URL's host."""


class UrlFetcher:
    """Fetches URLs within the limits. One per process."""

    def __init__(
        self,
        hosts: FetchHosts,
        resolve: Resolve = system_addresses,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = hosts
        self._resolve = resolve
        self._limits = limits or Limits()
        self._tls = tls or httpx2.create_ssl_context()
        self._slots = asyncio.Semaphore(self._limits.at_once)

    async def fetch(self, url: str, field: str, most_bytes: int = 0, accept: str = _ACCEPT_TEXT) -> Fetched:
        """Fetches a URL. `field` is the client's name of it, for errors. Raises RequestFailed.

        `most_bytes` takes the place of the limit of documents, unless it is 0.
        """
        hop = _Hop(field, most_bytes or self._limits.bytes, accept)
        placed = False
        try:
            async with asyncio.timeout(self._limits.seconds), self._slots:
                placed = True
                return await self._follow(url, hop)
        except TimeoutError:
            if not placed:
                reason = f"{field}: the server fetches {self._limits.at_once} other URLs already; come back later"
                raise RequestFailed(
                    ErrorKind.OVERLOADED, reason, field=field, retry_after=RETRY_AFTER_SECONDS
                ) from None
            hop.fail(f"takes longer than {self._limits.seconds:g} s")
        except _Refused as refusal:
            hop.fail(str(refusal))

    async def _follow(self, given: str, hop: _Hop) -> Fetched:
        url = hop.enter(given)
        for _ in range(self._limits.redirects + 1):
            addresses = await self._addresses(url)
            answer = await self._get(url, addresses, hop)
            if isinstance(answer, Fetched):
                return answer
            was_tls = url.scheme == "https"
            url = hop.enter(answer)
            if was_tls and url.scheme != "https":
                raise _Refused("is the target of a redirect from https to http")
        raise _Refused(f"is the end of more than {self._limits.redirects} redirects")

    async def _addresses(self, url: httpx2.URL) -> list[str]:
        """The addresses to connect to. If one address of the host is not allowed, none is."""
        host = _host(url)
        if not self._hosts.lists(host):
            raise _Refused("is not among the hosts that this server fetches from (--fetch-hosts)")
        try:
            found = await self._resolve(host, _port(url))
        except (OSError, UnicodeError):
            raise _Refused("cannot be resolved") from None
        if not found:
            raise _Refused("has no address")
        for text in found:
            if not self._hosts.opens(ipaddress.ip_address(text)):
                log.info("no URL is fetched from %s: its address %s is not public and not in --fetch-hosts", host, text)
                raise _Refused("has an address that is not public, and that --fetch-hosts does not list")
        return list(found[:MOST_ADDRESSES])

    async def _get(self, url: httpx2.URL, addresses: Sequence[str], hop: _Hop) -> Fetched | str:
        """Requests a URL at its addresses; returns the content, or the URL that it redirects to."""
        for address in addresses:
            try:
                return await self._exchange(url, address, self._limits.seconds / len(addresses), hop)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                certificate = next((e for e in _causes(error) if isinstance(e, ssl.SSLCertVerificationError)), None)
                if certificate is not None:
                    raise _Refused(f"has no valid certificate: {certificate.verify_message.rstrip('.')}") from None
            except httpx2.HTTPError as error:
                raise _Refused(f"broke off, or does not speak HTTP ({type(error).__name__})") from None
        raise _Refused("does not take a connection")

    async def _exchange(self, url: httpx2.URL, address: str, connect_seconds: float, hop: _Hop) -> Fetched | str:
        """Sends one request on a connection of its own, to the address, with the URL's host in its head."""
        host = _host(url).removesuffix(".")
        span = trace_context.current.get()
        request = httpx2.Request(
            "GET",
            url.copy_with(host=address),
            headers={
                "Accept": hop.accept,
                **_HEADERS,
                **({} if span is None else span.headers()),
                "Host": url.netloc.decode("ascii"),
                "User-Agent": f"tokenyard/{release()}",
            },
            extensions={"sni_hostname": host, "timeout": {"connect": connect_seconds}},
        )
        async with httpx2.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            try:
                return await self._read(response, url, hop.most_bytes)
            finally:
                await response.aclose()

    async def _read(self, response: httpx2.Response, url: httpx2.URL, limit: int) -> Fetched | str:
        if response.status_code in _REDIRECTS and "location" in response.headers:
            try:
                return str(url.join(response.headers["location"]))
            except httpx2.InvalidURL:
                raise _Refused("redirects to what is no URL") from None
        if response.status_code != 200:
            raise _Refused(f"answers with status {response.status_code}")
        body = await self._body(response, limit)
        return Fetched(body, response.headers.get("content-type", ""), url.path.rpartition("/")[2])

    async def _body(self, response: httpx2.Response, limit: int) -> bytes:
        too_large = _Refused(f"sends more than {limit} bytes")
        announced = response.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and int(announced[:19]) > limit:
            raise too_large
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            raise _Refused(f"encodes its answer as {encoding[:50]!r}; gzip is what can be read")
        unpacked = _Gzip() if encoding != "identity" else None
        body = bytearray()
        wire = 0
        async for chunk in response.aiter_raw():
            wire += len(chunk)
            body += unpacked.take(chunk, limit + 1 - len(body)) if unpacked else chunk
            if max(wire, len(body)) > limit:
                raise too_large
        if unpacked and not unpacked.complete:
            raise _Refused("sends gzip data that is damaged")
        return bytes(body)


class _Gzip:
    """One gzip stream, unpacked only as far as its reader has room."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def take(self, chunk: bytes, room: int) -> bytes:
        """At most `room` bytes, which is at least 1; when they are all used, the stream may have more."""
        try:
            return self._stream.decompress(chunk, room)
        except zlib.error:
            raise _Refused("sends gzip data that is damaged") from None

    @property
    def complete(self) -> bool:
        return self._stream.eof and not self._stream.unused_data


class _Hop:
    """The state of a fetch: the host that an error is about, and what is asked for."""

    def __init__(self, field: str, most_bytes: int, accept: str) -> None:
        self.most_bytes = most_bytes
        self.accept = accept
        self._field = field
        self._host = ""

    def enter(self, given: str) -> httpx2.URL:
        """Starts a hop to a URL. Raises _Refused unless it is a plain http or https URL."""
        try:
            url = httpx2.URL(given)
        except (httpx2.InvalidURL, UnicodeError):
            raise _Refused("is no URL that can be read") from None
        self._host = _host(url)[:253]
        if url.scheme not in ("http", "https") or not self._host:
            raise _Refused("is not named by an http or https URL")
        if url.port is not None and not 0 < url.port < 65536:
            raise _Refused("is named with a port that does not exist")
        if url.userinfo:
            raise _Refused("is named by a URL with a user or a password, which are not sent")
        return url

    def fail(self, reason: str) -> NoReturn:
        what = f"the host {self._host!r}" if self._host else "it"
        raise invalid(f"{self._field} cannot be fetched: {what} {reason}. Send the content itself instead", self._field)


def _host(url: httpx2.URL) -> str:
    """The host in ASCII and lower case."""
    return url.raw_host.decode("ascii").lower()


def _port(url: httpx2.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
