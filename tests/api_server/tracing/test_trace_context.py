"""W3C's trace context: what is read, what is passed on."""

from __future__ import annotations

import pytest

from api_server.trace_context import LONGEST_STATE, MOST_MEMBERS, TraceContext, caller

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (f"00-{TRACE}-{PARENT}-01", 1),
        (f"00-{TRACE}-{PARENT}-00", 0),
        (f"00-{TRACE}-{PARENT}-ff", 1),
        (f"cc-{TRACE}-{PARENT}-03-what-the-future-brings", 1),
    ],
)
def test_a_caller(header: str, flags: int) -> None:
    assert caller([(b"traceparent", header.encode())]) == TraceContext(TRACE, PARENT, flags)


@pytest.mark.parametrize(
    "header",
    [
        *("", "nonsense", f"00-{TRACE}-{PARENT}", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE.upper()}-{PARENT}-01"),
        *(f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{PARENT}-1", "\xff" * 55),
    ],
)
def test_a_malformed_caller_is_none(header: str) -> None:
    assert caller([(b"traceparent", header.encode("latin-1")), (b"tracestate", b"a=1")]) is None


def test_the_state_is_passed_on_as_it_came() -> None:
    found = caller(
        [(b"tracestate", b"a=1"), (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", b"b=2")]
    )
    assert found is not None
    assert found.headers() == {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1,b=2"}


MANY = ",".join(f"k{number}=v" for number in range(MOST_MEMBERS)).encode()
MALFORMED = [
    *(b"a=\xff", b"a=" + b"x" * LONGEST_STATE, b"a", b"a=", b"=1", b"A=1", b"a=1,b", b"a=1;b=2=3"),
    *(b"a=1,a=2", b"1a=1", b"the client's own words", b"a@=1", b"a@B=1", b"a@b@c=1", b"a=\x07"),
    *(b"k" * 257 + b"=1", MANY + b",one=more"),
]


@pytest.mark.parametrize("state", MALFORMED)
def test_a_state_that_no_server_can_pass_on_is_left_out(state: bytes) -> None:
    found = caller([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", state)])
    assert found == TraceContext(TRACE, PARENT, 1)


@pytest.mark.parametrize("state", [b"a=1", b"tenant@system=a b", b" a=1 ,\t,b1_*/-=~!+-<>", MANY])
def test_a_state_that_is_passed_on_is_one_for_the_library(state: bytes, caplog: pytest.LogCaptureFixture) -> None:
    found = caller([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", state)])
    assert found is not None
    assert found.state == state.decode()
    trace = pytest.importorskip("opentelemetry.trace")
    assert len(trace.TraceState.from_header([found.state])) == found.state.count("=")
    assert caplog.records == []
