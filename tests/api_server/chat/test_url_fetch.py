"""Fetching by URL, with real servers on the loopback address that lie, loop, drip and explode."""

from __future__ import annotations

import asyncio
import gzip
import logging
import random
import secrets
import ssl
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from ipaddress import ip_network

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from api_server import trace_context
from api_server.chat.url_fetch import Fetched, Limits, UrlFetcher
from api_server.errors import ErrorKind, RequestFailed
from api_server.trace_context import TraceContext
from shared.fetch_hosts import Address, FetchHosts
from tests.api_server.served_app import Page, Web, answer, redirect, running

LIMIT = 100_000
HERE = "127.0.0.1"
TRUSTING = ssl.create_default_context()


@pytest.fixture
def web() -> Iterator[Web]:
    with running(Web()) as served:
        yield served


class Resolver:
    """Tells each name's answers in turn, the last one for ever, and counts."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): list(rows) for name, rows in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        rows = self.answers.get(host, [[host]])
        return rows.pop(0) if len(rows) > 1 else rows[0]


def fetcher(hosts: str = HERE, resolve: Resolver | None = None, **limits: float) -> UrlFetcher:
    given = Limits(**({"seconds": 5.0, "bytes": LIMIT} | limits))  # type: ignore[arg-type]
    return UrlFetcher(FetchHosts.parse(hosts), resolve or Resolver(), given, TRUSTING)


async def fetch(url: str, hosts: str = HERE, resolve: Resolver | None = None, **limits: float) -> Fetched:
    return await fetcher(hosts, resolve, **limits).fetch(url, "the_field")


async def refusal(url: str, hosts: str = HERE, resolve: Resolver | None = None, **limits: float) -> str:
    with pytest.raises(RequestFailed) as caught:
        await fetch(url, hosts, resolve, **limits)
    assert (caught.value.kind, caught.value.field) == (ErrorKind.INVALID, "the_field")
    assert caught.value.message.startswith("the_field cannot be fetched: ")
    assert "Send the content itself" in caught.value.message
    return caught.value.message


async def test_a_page_is_fetched_and_nothing_of_this_process_goes_along(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    text = random.randbytes(random.randrange(LIMIT))
    web.pages = {"/a%20b.txt": answer(text, "Content-Type: text/plain; charset=utf-8"), "/": redirect("/a%20b.txt")}
    found = await fetch(web.url("/?q=1#part"))
    assert found == Fetched(text, "text/plain; charset=utf-8", "a b.txt")
    first, second = web.heads
    assert first.startswith("GET /?q=1 HTTP/1.1\r\n")
    for head in (first, second):
        assert f"host: 127.0.0.1:{web.port}\r\n" in head.lower()
        assert "accept-encoding: gzip\r\n" in head.lower()
        assert not {"cookie:", "authorization:", "referer:"} & {
            line.split(" ")[0] for line in head.lower().split("\r\n")
        }


async def test_the_trace_of_the_request_goes_along(web: Web) -> None:
    web.pages = {"/": answer(b"x")}
    token = trace_context.current.set(TraceContext("4b" * 16, "0a" * 8, 1, "a=1"))
    try:
        await fetch(web.url())
    finally:
        trace_context.current.reset(token)
    await fetch(web.url())
    with_trace, without = web.heads
    assert f"traceparent: 00-{'4b' * 16}-{'0a' * 8}-01\r\n" in with_trace
    assert "tracestate: a=1\r\n" in with_trace
    assert "trace" not in without


async def test_gzip_is_unpacked(web: Web) -> None:
    text = random.randbytes(500) * 100
    web.pages = {"/": answer(gzip.compress(text), "Content-Encoding: gzip")}
    assert (await fetch(web.url())).body == text


async def test_the_connection_goes_to_the_address_that_was_judged(web: Web) -> None:
    """A name server that changes its mind is not asked again; the server still hears the name."""
    resolve = Resolver(docs_example_com=[[HERE], ["169.254.169.254"]])
    web.pages = {"/": answer(b"x")}
    found = await fetch(web.url(host="Docs.Example.COM"), f"docs.example.com,{HERE}", resolve)
    assert (found.body, resolve.asked) == (b"x", ["docs.example.com"])
    assert f"host: docs.example.com:{web.port}\r\n" in web.heads[0].lower()


async def test_each_hop_is_judged_anew(web: Web) -> None:
    resolve = Resolver(docs_example_com=[[HERE], ["10.0.0.1"]])
    web.pages = {"/": redirect("/next"), "/next": answer(b"x")}
    assert "'docs.example.com' has an address that is not public" in await refusal(
        web.url(host="docs.example.com"), f"docs.example.com,{HERE}", resolve
    )
    assert (len(web.heads), len(resolve.asked)) == (1, 2)


@pytest.mark.parametrize(
    "addresses",
    [[HERE], ["8.8.8.8", HERE], ["::1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"], ["2002:7f00:1::"],
     ["169.254.169.254"], ["100.64.0.1"], ["fe80::1%1"], []],
)  # fmt: skip
async def test_a_name_that_leads_inside_is_refused_and_nobody_is_called(web: Web, addresses: list[str]) -> None:
    """One address that is not public spoils the others."""
    web.pages = {"/": answer(b"secret")}
    message = await refusal(
        web.url(host="docs.example.com"), "docs.example.com", Resolver(docs_example_com=[addresses])
    )
    assert "docs.example.com" in message
    assert not any(address in message for address in addresses)
    assert not web.heads


async def test_the_real_resolver(web: Web) -> None:
    web.pages = {"/": answer(b"x")}
    open_both = UrlFetcher(FetchHosts.parse("localhost,127.0.0.1,::1"))
    assert (await open_both.fetch(web.url(host="localhost"), "f")).body == b"x"
    for hosts in ("localhost", "*.localhost,no.such.host.invalid"):
        for host in ("localhost", "no.such.host.invalid"):
            with pytest.raises(RequestFailed, match=host):
                await UrlFetcher(FetchHosts.parse(hosts)).fetch(web.url(host=host), "f")
    assert len(web.heads) == 1


@pytest.mark.parametrize(
    "host",
    ["127.1", "0x7f.0.0.1", "2130706433", "0177.0.0.1", "[::ffff:127.0.0.1]", "[::1]", "[::7f00:1]", "localhost",
     "127.0.0.1.", "127.0.0.2", "docs.example.com@127.0.0.2", "①②⑦.0.0.1", "127.0.0.1%2f.docs.example.com",
     "docs.example.com.evil.net"],
)  # fmt: skip
async def test_other_spellings_open_nothing(web: Web, host: str) -> None:
    web.pages = {"/": answer(b"secret")}
    resolve = Resolver()
    await refusal(web.url(host=host), f"{HERE},docs.example.com", resolve)
    assert not web.heads + resolve.asked


@pytest.mark.parametrize(
    "url",
    ["ftp://127.0.0.1/x", "file:///etc/passwd", "gopher://127.0.0.1", "//127.0.0.1/", "127.0.0.1/", "http://",
     "http:///x", "http://127.0.0.1:0/", "http://127.0.0.1:99999/", "http://[::1", "data:text/plain,hi",
     "http://\x00/", "x" * 70_000, "http://a\r\nb/", ""],
)  # fmt: skip
async def test_what_is_no_http_url_is_refused(url: str) -> None:
    assert "is not among the hosts" not in await refusal(url)


@given(st.ip_addresses(), st.lists(st.ip_addresses(), max_size=3), st.integers(0, 128), st.booleans())
async def test_literal_addresses_are_open_where_the_list_holds_them(
    address: Address, listed: list[Address], length: int, long: bool
) -> None:
    """However the URL writes it; judged by `ipaddress` alone."""
    networks = [ip_network((each, min(length, each.max_prefixlen)), strict=False) for each in [*listed, address][:3]]
    host = (address.exploded if long else str(address)).upper()
    resolve = Resolver()
    resolve.answers[host.lower()] = [[]]
    message = await refusal(
        f"http://{f'[{host}]' if address.version == 6 else host}/", ",".join(map(str, networks)), resolve
    )
    is_open = any(address in network for network in networks)
    assert ("has no address" in message, "is not among the hosts" in message) == (is_open, not is_open)
    assert len(resolve.asked) == is_open


async def test_ipv6_works_where_it_is_listed() -> None:
    with running(Web("::1")) as web:
        web.pages = {"/": answer(b"six")}
        assert (await fetch(web.url(host="[::1]"), "::1")).body == b"six"
        assert f"host: [::1]:{web.port}\r\n" in web.heads[0].lower()
        # The first address takes no connection, the second one does.
        resolve = Resolver(docs_example_com=[[HERE, "::1"]])
        assert (await fetch(web.url(host="docs.example.com"), f"docs.example.com,{HERE},::1", resolve)).body == b"six"


async def test_users_and_passwords_are_refused_and_not_repeated(web: Web) -> None:
    secret = secrets.token_hex()
    for host in (f"me:{secret}@127.0.0.1", f"{secret}@127.0.0.1"):
        message = await refusal(web.url(f"/{secret}?key={secret}", host=host))
        assert secret not in message
    web.pages = {"/": redirect(web.url(host=f"me:{secret}@127.0.0.1"))}
    assert secret not in await refusal(web.url(f"/?key={secret}"))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "to", ["http://10.0.0.1/", "//127.0.0.2/x", "file:///etc/passwd", "http://[::1]/", "http://[", ""]
)
async def test_redirects_go_nowhere_else(web: Web, to: str, status: int) -> None:
    web.pages = {"/": redirect(to, status)}
    await refusal(web.url())
    assert len(web.heads) == (1 if to else 5)


async def test_redirects_end(web: Web) -> None:
    web.pages = {"/a": redirect("/b"), "/b": redirect(web.url("/a")), "/5": answer(b"x")}
    assert "redirects" in await refusal(web.url("/a"), redirects=3)
    assert len(web.heads) == 4
    web.pages |= {f"/{n}": redirect(f"/{n + 1}") for n in range(5)}
    assert (await fetch(web.url("/2"), redirects=3)).body == b"x"
    await refusal(web.url("/1"), redirects=3)


def bomb(size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1_000_000)) for _ in range(size // 1_000_000)) + packer.flush()


async def test_a_bomb_is_refused_at_the_limit(web: Web) -> None:
    small, packed = bomb(1_000_000), bomb(64_000_000)
    assert len(packed) < LIMIT
    web.pages = {"/warm": answer(small, "Content-Encoding: gzip"), "/": answer(packed, "Content-Encoding: gzip")}
    await refusal(web.url("/warm"))
    tracemalloc.start()
    try:
        assert f"more than {LIMIT} bytes" in await refusal(web.url())
        assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT
    finally:
        tracemalloc.stop()


def damaged(packed: bytes) -> list[bytes]:
    middle = len(packed) // 2
    broken = packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :]
    return [packed[:-5], broken, packed + packed, packed + b"more", b"no gzip", b""]


async def test_damaged_gzip_is_refused(web: Web) -> None:
    for data in damaged(gzip.compress(random.randbytes(3000))):
        web.pages = {"/": answer(data, "Content-Encoding: gzip")}
        assert "damaged" in await refusal(web.url())


@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "gzip, gzip", "gzip\t,br"])
async def test_other_encodings_are_never_unpacked(web: Web, encoding: str) -> None:
    web.pages = {"/": answer(zlib.compress(b"x" * 100), f"Content-Encoding: {encoding}")}
    assert "encodes" in await refusal(web.url())


HEAD = b"HTTP/1.1 200 OK\r\n"


def endless(chunked: bool) -> Page:
    def page() -> Iterator[bytes]:
        yield HEAD + (b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"\r\n")
        while True:
            yield b"1000\r\n" + bytes(4096) + b"\r\n" if chunked else bytes(4096)

    return page


async def test_sizes(web: Web) -> None:
    web.pages = {
        "/most": answer(bytes(LIMIT)),
        "/more": answer(bytes(LIMIT + 1)),
        "/announced": lambda: [HEAD + b"Content-Length: 99999999999\r\n\r\n", 10.0],
        "/chunks": endless(True),
        "/stream": endless(False),
        "/head": lambda: [HEAD, *(b"X-Y: %s\r\n" % bytes([97] * 1000) for _ in range(2000)), b"\r\n"],
    }
    assert len((await fetch(web.url("/most"))).body) == LIMIT
    for path in ("/more", "/announced", "/chunks", "/stream"):
        assert f"more than {LIMIT} bytes" in await refusal(web.url(path))
    await refusal(web.url("/head"))


@pytest.mark.parametrize(
    "page",
    [
        [HEAD + b"Content-Length: 100\r\n\r\nfew"],
        [HEAD + b"Content-Length: -1\r\n\r\nfew"],
        [HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nfew"],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc"],
        [b"SSH-2.0-OpenSSH\r\n"],
        [b"\x16\x03\x01\x00"],
        [],
    ],
)
async def test_what_breaks_off_or_lies_is_refused(web: Web, page: list[bytes]) -> None:
    web.pages = {"/": lambda: page}
    assert "broke off" in await refusal(web.url())


@pytest.mark.parametrize(
    "status", ["404 Not Found", "500 Oops", "401 No", "204 None", "206 Partial", "300 Many", "304 Same"]
)
async def test_a_failing_server_is_named_by_its_status(web: Web, status: str) -> None:
    web.pages = {"/": answer(b"" if status[0] == "3" or status[:3] == "204" else b"page", status=status)}
    assert f"'127.0.0.1' answers with status {status[:3]}" in await refusal(web.url("/?key=geheim"))


@pytest.mark.parametrize("parts", [[HEAD + b"\r\n"], [b""], [HEAD]])
async def test_a_slow_server_has_so_long_and_no_longer(web: Web, parts: list[bytes]) -> None:
    web.pages = {"/": lambda: [*parts, *(part for _ in range(1000) for part in (0.1, b"X"))]}
    assert "takes longer than 0.4 s" in await refusal(web.url(), seconds=0.4)
    assert await asyncio.to_thread(web.broken.wait, 30)


async def test_a_slow_resolver_counts(web: Web) -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    with pytest.raises(RequestFailed, match=r"takes longer than 0\.2 s"):
        await UrlFetcher(FetchHosts.parse(HERE), never, Limits(seconds=0.2)).fetch(web.url(), "f")


@pytest.mark.slow
async def test_few_at_once(web: Web) -> None:
    web.pages = {"/": lambda: [0.6, *answer(b"x")()]}
    one = fetcher(at_once=2, seconds=1.0)
    found = await asyncio.gather(*(one.fetch(web.url(), "f") for _ in range(5)), return_exceptions=True)
    assert web.most_open == 2
    late = [error for error in found if isinstance(error, RequestFailed)]
    busy = [error for error in late if error.kind is ErrorKind.OVERLOADED]
    assert len(busy) == 1
    assert busy[0].retry_after
    assert len(found) - len(late) == 2
    web.pages = {"/": answer(b"x")}
    assert (await one.fetch(web.url(), "f")).body == b"x"


async def test_a_fetch_that_is_cancelled_hangs_up(web: Web) -> None:
    web.pages = {"/": lambda: [HEAD + b"\r\n", 60.0]}
    task = asyncio.create_task(fetch(web.url()))
    assert await asyncio.to_thread(web.called.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(web.broken.wait, 30)


async def test_tls_is_checked_against_the_name_at_the_judged_address() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("docs.example.com").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    names = "docs.example.com,other.example.com"
    resolve = Resolver(docs_example_com=[[HERE]], other_example_com=[[HERE]])
    with running(Web(tls=context)) as web, running(Web()) as plain:
        web.pages = {"/": answer(b"x"), "/down": redirect(plain.url())}
        plain.pages = {"/": answer(b"x")}
        one = UrlFetcher(FetchHosts.parse(f"{names},{HERE}"), resolve, Limits(), trusting)
        for host in ("docs.example.com", "docs.example.com"):
            assert (await one.fetch(web.url(host=host), "f")).body == b"x"
        for host in ("other.example.com", HERE):
            with pytest.raises(RequestFailed, match="no valid certificate"):
                await one.fetch(web.url(host=host), "f")
        with pytest.raises(RequestFailed, match="from https to http"):
            await one.fetch(web.url("/down", host="docs.example.com"), "f")
        with pytest.raises(RequestFailed, match="no valid certificate"):
            await UrlFetcher(FetchHosts.parse(f"{names},{HERE}"), resolve).fetch(web.url(host="docs.example.com"), "f")
        assert not plain.heads


async def test_the_log_names_the_host_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await refusal(
            "http://docs.example.com/geheim?key=geheim", "docs.example.com", Resolver(docs_example_com=[[HERE]])
        )
    assert "docs.example.com" in caplog.text
    assert HERE in caplog.text
    assert "geheim" not in caplog.text
