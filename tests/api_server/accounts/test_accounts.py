"""Limits and use of keys over HTTP: headers, refusals in each dialect, the report, the figures, and a rotation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_server.text.tokenizer import Tokenizer
from shared.access_keys import AccessKeys, digest_of
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, encode, serving
from tests.api_server.dialects.test_openai import USER
from tests.api_server.scheduler_double import SchedulerDouble

CHAT = "/v1/chat/completions"
ADMIN = {"authorization": "Bearer boss"}

Start = Callable[..., LiveServer]


@pytest.fixture
def start(
    double: SchedulerDouble, run_directory: RunDirectory, tokenizer: Tokenizer, model_directory: Path
) -> Iterator[Start]:
    """Starts a server with one key, `sesame`, that has these options."""
    with ExitStack() as stack:

        def started(options: str = "") -> LiveServer:
            keys: dict[str, Any] = {"api_key": digest_of("sesame") + options, "admin_api_key": digest_of("boss")}
            settings = Settings(model=str(model_directory), **keys)
            return stack.enter_context(serving(double, run_directory, tokenizer, settings))

        yield started


def ask(live: LiveServer, path: str = CHAT, body: Any = None, key: str = "sesame") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(live.url + path, json=body or {"messages": USER, "max_tokens": 50}, headers=headers, timeout=90)


def report(live: LiveServer) -> Any:
    return httpx.get(live.url + "/usage", headers=ADMIN).json()


def test_requests_of_a_minute_are_counted_down_and_then_refused(start: Start) -> None:
    live = start(";rpm=3;name=team")
    answers = [ask(live) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
    assert float(answers[-1].headers["x-ratelimit-reset-requests"].removesuffix("s")) > 30
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    refused = ask(live)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    seconds = int(refused.headers["retry-after"])
    assert 1 <= seconds <= 20
    wanted = f"the key 'team' has used its 3 requests a minute: come again in {seconds} s, or ask the server's operator"
    assert wanted in refused.json()["error"]["message"]
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    # Pages that cost no generation, and other keys, are not limited.
    assert ask(live, "/v1/messages/count_tokens", {"messages": USER}).status_code == 200
    assert ask(live, key="boss").status_code == 200
    text = httpx.get(live.url + "/metrics").text
    assert f'tokenyard_requests_total{{outcome="rate_limited",route="{CHAT}"}} 1.0' in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": USER, "max_tokens": 5}),
        ("/generate", {"text": "x"}),
        ("/generate", {"inputs": "x"}),
        ("/api/chat", {"messages": USER}),
        ("/v2/models/tiny-chat/generate", {"text_input": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_every_dialect_refuses_in_its_own_form(start: Start, path: str, body: Any) -> None:
    live = start(";rpm=1")
    assert ask(live, path, body).status_code == 200
    refused = ask(live, path, body)
    assert refused.status_code == 429
    assert "1 requests a minute" in refused.text
    assert int(refused.headers["retry-after"]) >= 1


def test_tokens_of_a_minute_are_those_of_prompts_and_answers(start: Start, tokenizer: Tokenizer) -> None:
    live = start(";tpm=40")
    first = ask(live)
    assert (first.status_code, first.headers["x-ratelimit-limit-tokens"]) == (200, "40")
    used = first.json()["usage"]["total_tokens"]
    second = ask(live)
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    # The bucket fills by less than one token while these requests run, on all but the slowest machine.
    assert 40 - used - 1 <= left <= 40
    live.double.answer = lambda _: encode(tokenizer, "x")
    while (answer := ask(live)).status_code == 200:
        pass
    assert answer.status_code == 429
    assert "40 tokens a minute" in answer.text
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"


def test_the_report_and_the_figures_have_what_answers_said(start: Start, model_directory: Path) -> None:
    live = start(";name=team;tpm=100000")
    live.double.cached = 2
    usages = [ask(live).json()["usage"] for _ in range(3)]
    wanted = {
        "key": "team",
        "model": model_directory.name,
        "requests": 3,
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
        "cached_prompt_tokens": 6,
        "generation_tokens": sum(usage["completion_tokens"] for usage in usages),
    }
    found = report(live)
    assert found["usage"] == [wanted]
    assert found["limits"] == [{"key": "team", "requests_per_minute": None, "tokens_per_minute": 100000}]
    text = httpx.get(live.url + "/metrics").text
    for name in ("requests", "prompt_tokens", "cached_prompt_tokens", "generation_tokens"):
        line = f'tokenyard_key_{name}_total{{key="team",model="{model_directory.name}"}} {float(wanted[name])}'
        assert line in text
    assert httpx.get(live.url + "/usage", headers={"authorization": "Bearer sesame"}).status_code == 403


def test_a_client_that_left_has_used_what_was_computed(start: Start, tokenizer: Tokenizer) -> None:
    live = start(";name=team")
    live.double.answer = lambda _: encode(tokenizer, "x")
    live.double.step_seconds = 0.01
    body = {"messages": USER, "stream": True}
    with httpx.stream("POST", live.url + CHAT, json=body, headers={"authorization": "Bearer sesame"}) as stream:
        next(stream.iter_lines())
    live.double.wait(lambda: report(live)["usage"] and report(live)["usage"][0]["generation_tokens"] > 0)
    (use,) = report(live)["usage"]
    assert use["requests"] == 1
    assert use["prompt_tokens"] == len(live.double.submits[0].text.tokens.prompt)


def test_new_keys_bring_new_limits(start: Start) -> None:
    live = start(";rpm=1")
    assert [ask(live).status_code for _ in range(2)] == [200, 429]
    keys = AccessKeys((digest_of("sesame") + ";rpm=1000", digest_of("other")))
    live.state.keys = keys
    live.state.accounts.rotate(keys)
    # The bucket keeps what it holds, and fills at its new rate.
    live.double.wait(lambda: ask(live).status_code == 200)
    assert ask(live, key="other").status_code == 200
    assert "x-ratelimit-limit-requests" not in ask(live, key="other").headers


def test_a_stream_that_breaks_is_taken_up_although_the_key_has_used_its_minute(start: Start) -> None:
    live = start(";rpm=1;tpm=5")
    body = {"messages": USER, "stream": True, "max_tokens": 20}

    def stream(resume: str, last: str = "", name: str = "mine", **also: Any) -> httpx.Response:
        headers = {"authorization": "Bearer sesame", "x-request-id": name, "x-resume-stream": resume}
        position = {"last-event-id": last} if last else {}
        return httpx.post(live.url + CHAT, json=body | also, headers=headers | position, timeout=90)

    def ids_of(answer: httpx.Response) -> list[str]:
        assert answer.status_code == 200, answer.text
        return [line.removeprefix("id: ") for line in answer.text.splitlines() if line.startswith("id: ")]

    ids = ids_of(stream("true"))
    assert len(ids) > 3
    rest = stream("true", ids[1])
    assert ids_of(rest) == ids[2:]
    assert rest.headers["x-ratelimit-remaining-requests"] == "0"
    assert stream("end", ids[1]).status_code == 200
    assert stream("end").status_code == 200
    # What only looks like a stream that is taken up is a new request.
    refused = [
        stream("true"),
        stream("true", ids[1], "other"),
        stream("end", "", "other"),
        stream("true", ids[1], seed=5),
    ]
    assert [answer.status_code for answer in refused] == [429] * 4
    assert ask(live).status_code == 429
