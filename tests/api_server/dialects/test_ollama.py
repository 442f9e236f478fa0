"""Ollama's dialect, with its own Python client against the real server."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import ollama
import pytest

from api_server.answers.formats import AnswerFormats
from api_server.dialects.ollama.schema import ChatAnswer, GenerateAnswer
from api_server.dialects.ollama.turns import turns
from api_server.errors import RequestFailed
from api_server.text.tokenizer import Tokenizer
from interfaces.result.results import ErrorCode, RequestError
from shared.settings import Settings
from tests.api_server.conftest import CORPUS, LiveServer, encode
from tests.api_server.dialects.test_openai import UNICODE, post, says

USER: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(live: LiveServer) -> Any:
    return ollama.Client(host=live.url)


@pytest.fixture
def acting(live: LiveServer, tokenizer: Tokenizer) -> LiveServer:
    """A server whose model reasons and calls tools."""
    live.state.formats = AnswerFormats.of(Settings(tool_parser="hermes", reasoning_parser="think"), tokenizer)
    live.double.max_model_len = 2048
    live.double.wait(lambda: live.state.max_model_len == 2048)
    return live


def prompt_of(live: LiveServer, tokenizer: Tokenizer) -> str:
    ids = live.double.submits[-1].text.tokens.prompt.tolist()
    return str(tokenizer._backend.decode(ids, skip_special_tokens=False))


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat(client: Any, live: LiveServer, tokenizer: Tokenizer) -> None:
    answer = client.chat(model="tiny-chat:latest", messages=USER)
    assert (answer.message.role, answer.message.content, answer.done, answer.done_reason) == (
        "assistant",
        "Hello, world!",
        True,
        "stop",
    )
    assert prompt_of(live, tokenizer) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.model == "tiny-chat"
    assert answer.prompt_eval_count == len(live.double.submits[0].text.tokens.prompt)
    assert answer.eval_count == len(encode(tokenizer, "Hello, world!")) + 1
    durations = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert all(part > 0 for part in durations)
    assert answer.total_duration >= sum(durations) - 3  # each is rounded, and at least 1


@pytest.mark.parametrize("text", [UNICODE, random.choice(CORPUS)[: random.randrange(1, 40)]])
def test_streamed_text_is_the_text(client: Any, live: LiveServer, tokenizer: Tokenizer, text: str) -> None:
    says(live.double, tokenizer, text)
    chat = list(client.chat(model="tiny-chat", messages=USER, stream=True))
    plain = list(client.generate(model="tiny-chat", prompt="hi", stream=True))
    assert "".join(part.message.content for part in chat) == text
    assert "".join(part.response for part in plain) == text
    for parts in (chat, plain):
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].eval_count == len(text.encode()) + 1
        assert all(part.eval_count is None for part in parts[:-1])
    assert client.generate(model="tiny-chat", prompt="hi").response == text


@pytest.mark.parametrize(("path", "given"), [("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "hi"})])
def test_lines_are_exact(live: LiveServer, path: str, given: Any) -> None:
    form = ChatAnswer if path == "/api/chat" else GenerateAnswer
    # Streaming is the default.
    for line in lines_of(post(live, path, given)):
        assert form.model_validate(line).model_dump(exclude_unset=True) == line
    whole = post(live, path, {**given, "stream": False}).json()
    assert form.model_validate(whole).model_dump(exclude_unset=True) == whole


def test_curl_without_a_content_type_is_understood(live: LiveServer) -> None:
    """As in the examples of Ollama's documentation. A page must still say that it sends JSON."""
    body = json.dumps({"model": "tiny-chat", "prompt": "hi", "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert httpx.post(live.url + "/api/generate", content=body, headers=form).json()["response"] == "Hello, world!"
    page = httpx.post(live.url + "/api/generate", content=body, headers=form | {"origin": "http://localhost:1"})
    assert page.status_code == 415
    assert "application/json" in page.json()["error"]


def test_options_reach_the_sampler(client: Any, live: LiveServer) -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.05,
        "typical_p": 0.9,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 42,
        "stop": ["\n", "x"],
        "num_ctx": 4096,
        "mirostat": 1,
        "numa": True,
    }
    client.chat(model="tiny-chat", messages=USER, options=options, keep_alive="5m")
    found = live.double.submits[-1].text.sampling_params
    assert (found.max_new_tokens, found.temperature, found.top_k, found.top_p) == (7, 0.5, 9, 0.8)
    assert (found.min_p, found.typical_p, found.repetition_penalty) == (0.05, 0.9, 1.2)
    assert (found.presence_penalty, found.frequency_penalty, found.seed) == (0.5, 0.25, 42)
    assert found.stop == ["\n", "x"]
    for length in (-1, -2, 0):
        client.chat(model="tiny-chat", messages=USER, options={"num_predict": length, "seed": -1, "repeat_last_n": 0})
        found = live.double.submits[-1].text.sampling_params
        assert found.max_new_tokens == 256 - len(live.double.submits[-1].text.tokens.prompt)
        assert found.repetition_penalty == 1
    # The model's own defaults stay where a client says nothing.
    assert found.top_k == 20


def test_reasons_for_the_end(client: Any, live: LiveServer, tokenizer: Tokenizer) -> None:
    live.double.answer = lambda _: encode(tokenizer, "x")
    cut = client.chat(model="tiny-chat", messages=USER, options={"num_predict": 5})
    assert (cut.done_reason, cut.eval_count) == ("length", 5)
    says(live.double, tokenizer, "one. two")
    stopped = client.generate(model="tiny-chat", prompt="hi", options={"stop": ["."]})
    assert (stopped.response, stopped.done_reason) == ("one", "stop")


def test_nothing_to_say_loads_the_model(client: Any, live: LiveServer) -> None:
    assert client.generate(model="tiny-chat").done_reason == "load"
    assert client.generate(model="tiny-chat", keep_alive=0).done_reason == "unload"
    assert client.chat(model="tiny-chat", messages=[]).done_reason == "load"
    assert [line["done"] for line in lines_of(post(live, "/api/chat", {"model": "tiny-chat"}))] == [True]
    assert live.double.submits == []


def test_format_is_a_constraint(client: Any, live: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in ("json", schema):
        client.chat(model="tiny-chat", messages=USER, format=form)
        assert live.double.submits[-1].text.grammar
    client.chat(model="tiny-chat", messages=USER, format="")
    assert not live.double.submits[-1].text.grammar
    wrong = post(live, "/api/chat", {"messages": USER, "format": "yaml"})
    assert wrong.status_code == 400
    assert wrong.json() == {"error": "format must be \"json\" or a JSON schema (an object), got 'yaml'"}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_reasoning(acting: LiveServer, client: Any, tokenizer: Tokenizer, stream: bool) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    says(acting.double, tokenizer, f"<think>It may rain.</think>Let me see.{call}{call.replace('Köln', 'Bonn')}")
    answer = client.chat(model="tiny-chat", messages=USER, tools=[TOOL], think=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "It may rain."
    assert "".join(part.message.content for part in parts).strip() == "Let me see."
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [(found.name, found.arguments) for found in calls] == [
        ("get_weather", {"city": "Köln"}),
        ("get_weather", {"city": "Bonn"}),
    ]
    assert parts[-1].done_reason == "stop"
    assert "<think>" in prompt_of(acting, tokenizer)
    assert "get_weather" in prompt_of(acting, tokenizer)
    client.chat(model="tiny-chat", messages=USER, think=False)
    assert "<think>" not in prompt_of(acting, tokenizer)


def test_think_needs_a_model_that_reasons(client: Any, live: LiveServer, tokenizer: Tokenizer) -> None:
    live.state.formats = AnswerFormats.of(Settings(reasoning_parser="none"), tokenizer)
    with pytest.raises(ollama.ResponseError, match="think: reasoning, which 'tiny-chat' does not know"):
        client.chat(model="tiny-chat", messages=USER, think="high")
    assert client.chat(model="tiny-chat", messages=USER, think=False).message.content == "Hello, world!"


def test_a_result_belongs_to_the_first_open_call_of_its_tool() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": i}}} for i, name in enumerate(["a", "b", "a", "c"])]
    given = [
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "content": "", "tool_name": name} for name in ("b", "a", "a")),
        {"role": "tool", "content": ""},
        {"role": "tool", "content": ""},
    ]
    first, *results = turns(given, sees=False)
    ids = [call["id"] for call in first["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(len(identity) == 9 and identity.isalnum() for identity in ids)
    assert [(turn.get("tool_call_id"), turn.get("name")) for turn in results] == [
        (ids[1], "b"),
        (ids[0], "a"),
        (ids[2], "a"),
        (ids[3], "c"),
        (None, None),
    ]
    assert first["tool_calls"][2]["function"] == {"name": "a", "arguments": {"n": 2}}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", "messages[0] must be an object"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content must be a text"),
        ({"role": "user", "content": "", "images": ["AAAA"]}, "messages[0].images: an image, which this model cannot"),
        ({"role": "user", "content": "", "images": "AAAA"}, "messages[0].images must be a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function must be"),
    ],
)
def test_a_wrong_message_is_named(message: Any, error: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        turns([message], sees=error.endswith("list"))
    assert error in failed.value.message


def test_generate_has_a_system_prompt_a_raw_form_and_a_context(
    client: Any, live: LiveServer, tokenizer: Tokenizer
) -> None:
    first = client.generate(model="tiny-chat", prompt="hi", system="Be brief.")
    prompt = live.double.submits[-1].text.tokens.prompt.tolist()
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(live, tokenizer) == f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"
    assert first.context[: len(prompt)] == prompt
    client.generate(model="tiny-chat", prompt="hi", context=first.context)
    assert live.double.submits[-1].text.tokens.prompt.tolist() == [*first.context, *encode(tokenizer, turn)]
    raw = client.generate(model="tiny-chat", prompt="<|im_start|>user\n", raw=True)
    assert prompt_of(live, tokenizer) == "<|im_start|>user\n"
    assert raw.context is None
    for field in ("system", "images", "context"):
        value: Any = {"system": "x", "images": ["AAAA"], "context": [1]}[field]
        refused = post(live, "/api/generate", {"prompt": "x", "raw": True, field: value})
        assert (refused.status_code, field in refused.json()["error"]) == (400, True)
    for field in ("suffix", "template"):
        assert f"{field}: " in post(live, "/api/generate", {"prompt": "x", field: "y"}).json()["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: Any, live: LiveServer, tokenizer: Tokenizer, stream: bool) -> None:
    answer = client.chat(model="tiny-chat", messages=USER, logprobs=True, top_logprobs=3, stream=stream)
    parts = list(answer) if stream else [answer]
    found = [entry for part in parts for entry in part.logprobs or ()]
    assert len(found) == parts[-1].eval_count
    assert "".join(entry.token for entry in found[:-1]) == "Hello, world!"
    assert all(len(entry.top_logprobs) == 3 for entry in found)


def test_facts_that_clients_ask_for_first(client: Any, live: LiveServer) -> None:
    (listed,) = client.list().models
    assert listed.model == "tiny-chat"
    assert len(listed.digest) == 64
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == ("tiny-chat", 256)
    shown = client.show("tiny-chat:latest")
    assert {"completion", "tools"} <= set(shown.capabilities)
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == 256
    assert "im_start" in shown.template
    version = httpx.get(live.url + "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_models_are_not_managed_here(client: Any, live: LiveServer) -> None:
    assert client.pull("tiny-chat:latest").status == "success"
    assert [part.status for part in client.pull("tiny-chat", stream=True)] == ["success"]
    for refused in (
        lambda: client.pull("llama3"),
        lambda: client.push("tiny-chat"),
        lambda: client.create("x", from_="tiny-chat"),
        lambda: client.copy("tiny-chat", "x"),
        lambda: client.delete("tiny-chat"),
    ):
        with pytest.raises(ollama.ResponseError, match="its operator chooses them at the start") as failed:
            refused()
        assert failed.value.status_code == 501
    assert httpx.post(live.url + "/api/pull", json={}).status_code == 400


def test_errors(client: Any, live: LiveServer) -> None:
    with pytest.raises(ollama.ResponseError, match="'llama3' does not exist") as missing:
        client.chat(model="llama3", messages=USER)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="llama3") as unknown:
        client.show("llama3")
    assert unknown.value.status_code == 404
    wrong = post(live, "/api/chat", {"messages": USER, "options": {"top_p": 2}})
    assert (wrong.status_code, "options.top_p" in wrong.json()["error"]) == (400, True)
    resumed = post(live, "/api/chat", {"messages": USER}, **{"x-resume-stream": "true"})
    assert (resumed.status_code, "x-resume-stream" in resumed.json()["error"]) == (400, True)
    live.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    busy = post(live, "/api/chat", {"messages": USER})
    assert busy.status_code == 429
    assert int(busy.headers["retry-after"]) >= 1
    assert set(busy.json()) == {"error"}
    embed = post(live, "/api/embed", {"input": "x"})
    assert (embed.status_code, "--task embed" in embed.json()["error"]) == (400, True)


def test_an_error_after_the_first_line_is_the_last_line(client: Any, live: LiveServer, tokenizer: Tokenizer) -> None:
    live.double.answer = lambda _: encode(tokenizer, "x")
    live.double.max_model_len = 10**9
    stream = client.chat(model="tiny-chat", messages=USER, stream=True, options={"num_predict": 200})
    next(stream)
    live.double.hold.set()
    live.state.engine.end_all_in(0)
    with pytest.raises(ollama.ResponseError, match="server"):
        list(stream)


def test_the_front_page_of_ollamas_port(live: LiveServer) -> None:
    assert httpx.get(live.url + "/").text.startswith("tokenyard serves")
    port = httpx.URL(live.url).port
    assert port is not None
    live.state.settings = Settings(model=live.state.settings.model, ollama_port=port)
    assert httpx.get(live.url + "/").text == "Ollama is running"
    assert httpx.head(live.url + "/").status_code == 200
    page = httpx.get(live.url + "/", headers={"accept": "text/html"})
    assert page.status_code == 307
    assert page.headers["location"] == "/ui/"
