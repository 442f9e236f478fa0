"""Log probabilities in every dialect's form, with the real openai client where there is one; streams tell the same."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import openai
import pytest

from interfaces.request.sampling import SamplingParams
from tests.api_server.conftest import LiveServer, encode
from tests.api_server.scheduler_double import logprob_of, report_of

PROMPT = "The quick brown fox; Größe 日本 😀"
ANSWER = "Hello, world! 漢字 😃 naïve"


class Case:
    """What the double answers, and which values it reports."""

    def __init__(self, live: LiveServer) -> None:
        tokenizer = live.state.tokenizer
        self.piece = tokenizer.piece
        self.eos = tokenizer.eos_token_ids[0]
        self.prompt = encode(tokenizer, PROMPT)
        self.answer = [*encode(tokenizer, ANSWER), self.eos]
        live.double.answer = lambda _: self.answer
        self.client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=90)

    def top(self, token: int, count: int) -> list[int]:
        return report_of(token, SamplingParams(top_logprobs=count))[0]


@pytest.fixture
def case(live: LiveServer) -> Case:
    return Case(live)


def post(live: LiveServer, path: str, body: Any) -> Any:
    response = httpx.post(live.url + path, json=body, timeout=90)
    assert response.status_code == 200, response.text
    return response.json()


def events(live: LiveServer, path: str, body: Any) -> list[Any]:
    response = httpx.post(live.url + path, json=body | {"stream": True}, timeout=90)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("top", [0, 3, 20])
def test_chat(case: Case, top: int) -> None:
    ask: dict[str, Any] = {
        "model": "",
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": top,
    }
    whole = case.client.chat.completions.create(**ask).choices[0].logprobs
    assert whole is not None
    content = whole.content
    assert content is not None
    assert [(entry.token, entry.logprob) for entry in content] == [
        (case.piece(token), logprob_of(token)) for token in case.answer
    ]
    assert b"".join(bytes(entry.bytes or []) for entry in content[:-1]).decode() == ANSWER
    for entry, token in zip(content, case.answer, strict=True):
        told = [(other.token, other.logprob) for other in entry.top_logprobs]
        assert told == [(case.piece(i), logprob_of(i)) for i in case.top(token, top)]
    streamed: list[Any] = []
    for chunk in case.client.chat.completions.create(**ask, stream=True):
        told = chunk.choices[0].logprobs
        streamed += told.content or [] if told is not None else []
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in content]


def test_a_chat_without_logprobs_has_none(case: Case) -> None:
    answer = case.client.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [0, 2])
def test_completions(case: Case, echo: bool, logprobs: int) -> None:
    ask: dict[str, Any] = {"model": "", "prompt": PROMPT, "logprobs": logprobs, "echo": echo, "max_tokens": 100}
    choice = case.client.completions.create(**ask).choices[0]
    told = choice.logprobs
    assert told is not None
    assert choice.text == (PROMPT if echo else "") + ANSWER
    tokens = (case.prompt if echo else []) + case.answer
    own: list[float | None] = [logprob_of(token) for token in tokens]
    if echo:
        own[0] = None
    assert told.tokens == [case.piece(token) for token in tokens]
    assert told.token_logprobs == own
    assert told.text_offset is not None
    assert told.text_offset == sorted(told.text_offset)
    for token, offset in zip(tokens, told.text_offset, strict=True):
        piece = case.piece(token)
        assert "�" in piece or token == case.eos or choice.text.startswith(piece, offset)
    for i, (token, row) in enumerate(zip(tokens, told.top_logprobs or [], strict=True)):
        if echo and i == 0:
            assert row is None
            continue
        assert row[case.piece(token)] >= logprob_of(token)
        assert max(row.values()) == max(map(logprob_of, [token, *case.top(token, logprobs)]))
    parts: dict[str, list[Any]] = {}
    text = ""
    for chunk in case.client.completions.create(**ask, stream=True):
        text += chunk.choices[0].text
        found = chunk.choices[0].logprobs
        for name, values in (found.model_dump() if found is not None else {}).items():
            parts.setdefault(name, []).extend(values)
    assert text == choice.text
    assert parts == told.model_dump()


def test_a_prompt_is_scored_without_generating(case: Case, live: LiveServer) -> None:
    """What lm-eval asks for; max_tokens 1 generates one token, 0 none."""
    for prompts in (PROMPT, [case.prompt, case.prompt[:3]]):
        for count in (0, 1):
            body = {"prompt": prompts, "max_tokens": count, "echo": True, "logprobs": 1, "temperature": 0}
            answer = post(live, "/v1/completions", body)
            for choice, ids in zip(answer["choices"], [case.prompt, case.prompt[:3]], strict=False):
                own = [logprob_of(token) for token in ids + case.answer[:count]]
                assert choice["logprobs"]["token_logprobs"] == [None, *own[1:]]
                assert choice["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == count * len(answer["choices"])
    stream = events(live, "/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert "".join(event["choices"][0]["text"] for event in stream) == PROMPT
    assert stream[-1]["choices"][0]["finish_reason"] == "length"


def test_sglang_native(case: Case, live: LiveServer) -> None:
    start = random.randint(0, len(case.prompt))
    ids = [5, 77, 5]
    body = {
        "text": PROMPT,
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
        "token_ids_logprob": ids,
        "return_text_in_logprobs": True,
    }
    meta = post(live, "/generate", body)["meta_info"]

    def entry(token: int) -> list[Any]:
        return [logprob_of(token), token, case.piece(token)]

    sides = {"input": case.prompt[start:], "output": case.answer}
    for side, tokens in sides.items():
        nothing = [None] if side == "input" and start == 0 else []
        said = tokens[len(nothing) :]
        own = meta[f"{side}_token_logprobs"]
        assert [value[:2] for value in own] == [
            [None if i < len(nothing) else logprob_of(token), token] for i, token in enumerate(tokens)
        ]
        assert meta[f"{side}_top_logprobs"] == [*nothing, *([entry(i) for i in case.top(token, 2)] for token in said)]
        assert meta[f"{side}_token_ids_logprobs"] == [*nothing, *([entry(i) for i in ids] for _ in said)]
    last = events(live, "/generate", body)[-1]["meta_info"]
    for name, value in meta.items():
        if "logprobs" in name:
            assert last[name] == value


def test_sglang_token_ids_once_or_one_list_each(case: Case, live: LiveServer) -> None:
    for given, wanted in (([3, 4], [[3, 4], [3, 4]]), ([[3], None], [[3], None])):
        body = {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": given}
        answers = post(live, "/generate", body)
        for answer, ids in zip(answers, wanted, strict=True):
            rows = answer["meta_info"].get("output_token_ids_logprobs")
            assert (rows and [entry[1] for entry in rows[0]]) == ids
    scored = post(
        live,
        "/generate",
        {"text": "a", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}},
    )
    assert scored["meta_info"]["input_token_logprobs"][0][0] is None
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert scored["output_ids"] == []


def test_tgi(case: Case, live: LiveServer) -> None:
    parameters = {"details": True, "decoder_input_details": True, "top_n_tokens": 3}
    details = post(live, "/generate", {"inputs": PROMPT, "parameters": parameters})["details"]
    assert [(token["id"], token["logprob"]) for token in details["prefill"]] == [
        (token, logprob_of(token) if i else None) for i, token in enumerate(case.prompt)
    ]
    assert "".join(token["text"] for token in details["prefill"]) == PROMPT
    wanted = [
        [
            {"id": i, "text": case.piece(i), "logprob": logprob_of(i), "special": i in (0, 1, 2)}
            for i in case.top(token, 3)
        ]
        for token in case.answer
    ]
    assert details["top_tokens"] == wanted
    implied = post(live, "/generate", {"inputs": PROMPT, "parameters": {"decoder_input_details": True}})
    assert implied["details"]["prefill"] == details["prefill"]
    assert "top_tokens" not in implied["details"]
    stream = httpx.post(
        live.url + "/generate_stream", json={"inputs": PROMPT, "parameters": {"top_n_tokens": 3}}, timeout=90
    )
    frames = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
    assert [frame["top_tokens"] for frame in frames] == wanted


@pytest.mark.slow
def test_reports_survive_a_restart_of_the_scheduler(case: Case, live: LiveServer) -> None:
    """The new scheduler is told what the client has, and tells only the rest."""
    live.double.step_seconds = 0.02
    body = {"text": PROMPT, "stream": True, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    with httpx.stream("POST", live.url + "/generate", json=body, timeout=90) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        live.double.restart()
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(live.double.submits) == 2
    meta = rest[-1]["meta_info"]
    assert [value[1] for value in meta["input_token_logprobs"]] == case.prompt
    assert [value[1] for value in meta["output_token_logprobs"]] == case.answer
    assert [row[0][1] for row in meta["output_top_logprobs"]] == [case.top(token, 1)[0] for token in case.answer]


def two_answers(case: Case, live: LiveServer) -> list[list[int]]:
    """What the double answers in turn; the second one has the higher mean logprob."""
    answers = [[*(t for t in case.answer[:-1] if logprob_of(t) < -3), case.eos], [64, 128, 65, case.eos]]
    live.double.answer = lambda _: answers[(len(live.double.submits) - 1) % 2]
    means = [sum(map(logprob_of, answer)) / len(answer) for answer in answers]
    assert means[0] < means[1]
    return answers


def test_tgi_best_of(case: Case, live: LiveServer) -> None:
    answers = two_answers(case, live)
    parameters = {"best_of": 2, "do_sample": True, "details": True, "top_n_tokens": 1, "decoder_input_details": True}
    answer = post(live, "/generate", {"inputs": PROMPT, "parameters": parameters})
    (loser,) = answer["details"].pop("best_of_sequences")
    assert [token["id"] for token in answer["details"]["tokens"]] == answers[1]
    assert [token["id"] for token in loser["tokens"]] == answers[0]
    assert loser.keys() == {"generated_text", *answer["details"]}
    assert loser["seed"] != answer["details"]["seed"]
    assert len({submit.text.sampling_params.seed for submit in live.double.submits}) == 2
    plain = post(live, "/generate", {"inputs": PROMPT, "parameters": {"best_of": 2, "top_p": 0.5}})
    assert plain == {"generated_text": answer["generated_text"]}


def test_openai_best_of(case: Case, live: LiveServer) -> None:
    answers = two_answers(case, live)
    told = case.client.completions.create(model="", prompt=["a", "b"], best_of=2, logprobs=1, max_tokens=50)
    assert [choice.index for choice in told.choices] == [0, 1]
    for choice in told.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == list(map(logprob_of, answers[1]))
    assert told.usage is not None
    assert told.usage.completion_tokens == 2 * sum(map(len, answers))
    plain = case.client.completions.create(model="", prompt="a", best_of=2, max_tokens=50)
    assert [choice.text for choice in plain.choices] == [told.choices[0].text]
    assert plain.choices[0].logprobs is None
    both = case.client.completions.create(model="", prompt="a", best_of=2, n=2, max_tokens=50)
    assert len(both.choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of"):
        case.client.completions.create(model="", prompt="a", best_of=2, stream=True)


def test_tgi_typical_p_samples_and_watermark_is_passed_on(case: Case, live: LiveServer) -> None:
    post(live, "/generate", {"inputs": PROMPT, "parameters": {"typical_p": 0.4, "watermark": True}})
    sampling = live.double.submits[-1].text.sampling_params
    assert (sampling.typical_p, sampling.temperature, sampling.watermark) == (0.4, 1.0, True)
