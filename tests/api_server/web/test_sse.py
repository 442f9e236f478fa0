"""What holds for the streams of all dialects: their headers, and lines that every client cuts alike."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from api_server.text.tokenizer import Tokenizer
from api_server.web.sse import frame, named_frame
from tests.api_server.conftest import LiveServer, encode

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "stream": True}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "x", "max_tokens": 60, "stream": True}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 60, "stream": True}),
    ("/v1/messages", CHAT | {"model": "tiny-chat"}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 60}, "stream": True}),
    ("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 60}}),
    ("/", {"inputs": "x", "parameters": {"max_new_tokens": 60}, "stream": True}),
    ("/invocations", CHAT),
]

LINE_ENDS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r\n"
"""All that `str.splitlines` cuts at."""


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_no_line_of_a_stream_is_cut_at_other_line_ends(
    live: LiveServer, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    text = f"日本a{LINE_ENDS}b"
    live.double.answer = lambda _: [*encode(tokenizer, text), tokenizer.eos_token_ids[0]]
    with httpx.stream("POST", live.url + path, json=body) as answer:
        data = answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert data.decode().splitlines() == data.decode().split("\n")[:-1]
    events = [line.removeprefix("data:") for line in data.decode().splitlines() if line.startswith("data:")]
    told = "".join(json.dumps(json.loads(event), ensure_ascii=False) for event in events if event.strip() != "[DONE]")
    assert "\u2028" in told
    assert "\u0085" in told


def test_frames_are_the_value_again() -> None:
    value = {"type": "x", "text": f"ä{LINE_ENDS}\u00c2\u0080\u2027 \\u2028", "\u2028": 1}
    for data in (frame(value), named_frame(value)):
        lines = data.decode().splitlines()
        assert lines[-2].startswith("data: ")
        assert json.loads(lines[-2].removeprefix("data: ")) == value
        assert lines[-1] == ""
