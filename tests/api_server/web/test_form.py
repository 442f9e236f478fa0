"""Multipart forms: texts and one file, within bounds; everything else is refused by a sentence."""

from __future__ import annotations

import asyncio

import pytest
from starlette.datastructures import Headers

from api_server.engine import scheduling
from api_server.errors import ErrorKind, RequestFailed
from api_server.web.form import Form, read_form
from shared.access_keys import Caller

HEADERS = Headers({"content-type": "multipart/form-data; boundary=XX"})


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value + b"\r\n"


async def test_fields_and_a_file_are_read() -> None:
    sound = bytes(range(256)) * 10_000
    body = part("model", b"tiny") + part("file", sound, "a.wav") + part("kinds[]", b"a") + part("kinds[]", b"b")
    form = await read_form(HEADERS, body + b"--XX--\r\n")
    assert form == Form({"model": ["tiny"], "kinds": ["a", "b"]}, {"file": sound})
    assert form.text("model") == "tiny"
    assert form.text("language") is None
    with pytest.raises(RequestFailed, match="kinds must be given once, got 2 values"):
        form.text("kinds")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (part("file", b"1", "a") + part("other", b"2", "b"), "Too many files"),
        (b"".join(part(f"f{i}", b"") for i in range(101)), "Too many fields"),
        (part("prompt", b"x" * (1 << 21)), "Part exceeded maximum size"),
        (b"--XX\r\nContent-Disposition: form-data\r\n\r\nx\r\n", "name"),
        (b"{}", "is no form that can be read"),
    ],
)
async def test_bounds_and_broken_bodies(body: bytes, reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason) as caught:
        await read_form(HEADERS, body + b"--XX--\r\n")
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize("declared", ["application/json", "", "multipart/mixed; boundary=XX"])
async def test_another_media_type_is_refused(declared: str) -> None:
    with pytest.raises(RequestFailed, match="must be multipart/form-data") as caught:
        await read_form(Headers({"content-type": declared}), b"{}")
    assert caught.value.kind is ErrorKind.BAD_MEDIA_TYPE


async def test_a_route_may_take_more_files_but_each_once() -> None:
    body = part("image", b"1", "a") + part("mask", b"2", "b")
    assert (await read_form(HEADERS, body + b"--XX--\r\n", most_files=3)).files == {"image": b"1", "mask": b"2"}
    with pytest.raises(RequestFailed, match="image must be given once, as one file"):
        await read_form(HEADERS, body + part("image[]", b"3", "c") + b"--XX--\r\n", most_files=3)


async def test_a_form_without_a_boundary_is_refused() -> None:
    with pytest.raises(RequestFailed, match="Missing boundary"):
        await read_form(Headers({"content-type": "multipart/form-data"}), b"--XX--")


async def test_other_requests_go_on_while_a_form_is_parsed() -> None:
    ticks = 0

    async def count() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await read_form(HEADERS, part("file", bytes(1 << 20), "a.wav") + b"--XX--\r\n")
    counting.cancel()
    # Once for each 64 KiB.
    assert ticks >= 16


async def test_scheduling_options_are_taken_out_of_a_form() -> None:
    form = Form({"timeout": ["5"], "priority": ["-1"], "deterministic": ["True"], "model": ["tiny"]}, {"file": b""})
    options = scheduling.of_texts(form.text)
    assert options == {"timeout": "5", "priority": "-1", "deterministic": True}
    assert form.without(options).names == {"model", "file"}
    read = scheduling.options_of(Headers(), options, Caller(), may_hurry=False)
    assert (read.total_seconds, read.priority, read.deterministic) == (5.0, -1, True)
    with pytest.raises(RequestFailed, match="timeout must be a number of seconds"):
        scheduling.options_of(Headers(), scheduling.of_texts(Form({"timeout": ["soon"]}).text), Caller(), False)
