"""Numbers of items: each dialect refuses too many by name, count and limit, before anything is done for each item."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from api_server.body import item_limits
from api_server.body.item_limits import MAX_TEXT, MOST_PARTS, MOST_STOP_IDS, MOST_TOKEN_IDS, MOST_TOOLS, MOST_TURNS
from api_server.chat.tools import tool_use
from api_server.errors import RequestFailed
from api_server.parsers.call_grammar import CallGrammar, strict_tags
from api_server.parsers.registry import TOOL_FORMATS
from tests.api_server.conftest import LiveServer

SAY = {"role": "user", "content": "x"}
TEXT = {"type": "text", "text": "x"}
MODEL = {"model": "tiny-chat"}


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]


MANY_TURNS = [SAY] * (MOST_TURNS + 1)
MANY_PARTS = [{"role": "user", "content": [TEXT] * 5000}] * 4
MANY_TOOLS = tools(MOST_TOOLS + 1)
MANY_IDS = list(range(MOST_STOP_IDS + 1))
MANY_BIASES = dict.fromkeys(map(str, range(MOST_TOKEN_IDS + 1)), 0.0)
ANTHROPIC: dict[str, Any] = MODEL | {"max_tokens": 1, "messages": [SAY]}
RESULTS = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT] * (MOST_PARTS + 1)}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

TOO_MANY: list[tuple[str, dict[str, Any], str, int, int]] = [
    ("/v1/chat/completions", {"messages": MANY_TURNS}, "messages", MOST_TURNS + 1, MOST_TURNS),
    ("/v1/chat/completions", {"messages": MANY_PARTS}, "messages", 20_000, MOST_PARTS),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 20_000}]},
        "messages",
        20_000,
        MOST_PARTS,
    ),
    ("/v1/chat/completions", {"messages": [SAY], "tools": MANY_TOOLS}, "tools", MOST_TOOLS + 1, MOST_TOOLS),
    ("/v1/chat/completions", {"messages": [SAY], "stop": ["a"] * 33}, "stop", 33, 32),
    ("/v1/chat/completions", {"messages": [SAY], "bad_words": ["a"] * 65}, "bad_words", 65, 64),
    (
        "/v1/chat/completions",
        {"messages": [SAY], "stop_token_ids": MANY_IDS},
        "stop_token_ids",
        MOST_STOP_IDS + 1,
        MOST_STOP_IDS,
    ),
    (
        "/v1/chat/completions",
        {"messages": [SAY], "logit_bias": MANY_BIASES},
        "logit_bias",
        MOST_TOKEN_IDS + 1,
        MOST_TOKEN_IDS,
    ),
    ("/chat_tokenize", {"messages": MANY_TURNS}, "messages", MOST_TURNS + 1, MOST_TURNS),
    ("/invocations", {"messages": MANY_TURNS}, "messages", MOST_TURNS + 1, MOST_TURNS),
    ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt", 1025, 1024),
    ("/v1/completions", {"prompt": [[1]] * 1025}, "prompt", 1025, 1024),
    ("/v1/completions", {"prompt": "a", "stop": ["a"] * 500_000}, "stop", 500_000, 32),
    (
        "/v1/completions",
        {"prompt": [1] * (MAX_TEXT + 1), "truncate_prompt_tokens": 5},
        "prompt",
        MAX_TEXT + 1,
        MAX_TEXT,
    ),
    ("/v1/completions", {"prompt": "a", "allowed_token_ids": [1] * 100_001}, "allowed_token_ids", 100_001, 100_000),
    ("/v1/responses", {"input": MANY_TURNS}, "input", MOST_TURNS + 1, MOST_TURNS),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 20_000}]},
        "input",
        20_000,
        MOST_PARTS,
    ),
    ("/v1/responses", {"input": "a", "tools": MANY_TOOLS}, "tools", MOST_TOOLS + 1, MOST_TOOLS),
    ("/v1/messages", ANTHROPIC | {"messages": MANY_TURNS}, "messages", MOST_TURNS + 1, MOST_TURNS),
    ("/v1/messages", ANTHROPIC | {"messages": MANY_PARTS}, "messages", 20_000, MOST_PARTS),
    (
        "/v1/messages",
        ANTHROPIC | {"messages": [{"role": "user", "content": [RESULTS]}]},
        "messages",
        MOST_PARTS + 2,
        MOST_PARTS,
    ),
    ("/v1/messages", ANTHROPIC | {"system": [TEXT] * (MOST_TURNS + 1)}, "system", MOST_TURNS + 1, MOST_TURNS),
    (
        "/v1/messages",
        ANTHROPIC | {"tools": [{"name": f"f{i}", "input_schema": {}} for i in range(MOST_TOOLS + 1)]},
        "tools",
        MOST_TOOLS + 1,
        MOST_TOOLS,
    ),
    ("/v1/messages", ANTHROPIC | {"stop_sequences": ["a"] * 33}, "stop_sequences", 33, 32),
    ("/v1/messages/count_tokens", MODEL | {"messages": MANY_TURNS}, "messages", MOST_TURNS + 1, MOST_TURNS),
    ("/generate", {"text": ["a"] * 1025}, "text", 1025, 1024),
    ("/generate", {"input_ids": [[1]] * 1025}, "input_ids", 1025, 1024),
    ("/generate", {"input_embeds": [[[0.0]]] * 1025}, "input_embeds", 1025, 1024),
    ("/generate", {"text": "a", "sampling_params": [{}] * 1025}, "sampling_params", 1025, 1024),
    ("/generate", {"text": "a", "return_logprob": [True] * 1025}, "return_logprob", 1025, 1024),
    ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": MANY_IDS}}, "stop_token_ids", 257, 256),
    ("/generate", {"text": "a", "sampling_params": {"stop": ["a"] * 33}}, "stop strings", 33, 32),
    ("/generate", {"text": "a", "sampling_params": {"stop_regex": ["a"] * 33}}, "stop_regex", 33, 32),
    (
        "/generate",
        {"text": "a", "sampling_params": {"logit_bias": MANY_BIASES}},
        "logit_bias",
        MOST_TOKEN_IDS + 1,
        MOST_TOKEN_IDS,
    ),
    ("/generate", {"inputs": "a", "parameters": {"stop": ["a"] * 5}}, "stop", 5, 4),
    ("/tokenize", {"prompt": ["a"] * 1025}, "prompt", 1025, 1024),
    ("/v1/tokenize", {"messages": MANY_TURNS}, "messages", MOST_TURNS + 1, MOST_TURNS),
    ("/v1/tokenize", {"messages": [SAY], "tools": MANY_TOOLS}, "tools", MOST_TOOLS + 1, MOST_TOOLS),
    ("/detokenize", {"tokens": [[1]] * 1025}, "tokens", 1025, 1024),
    ("/detokenize", {"tokens": [1] * (MAX_TEXT + 1)}, "tokens", MAX_TEXT + 1, MAX_TEXT),
    ("/detokenize", {"tokens": [[1] * MAX_TEXT, [1]]}, "tokens", MAX_TEXT + 1, MAX_TEXT),
    ("/v1/score", {"query": "a", "items": ["b"] * 1025, "label_token_ids": [1]}, "items", 1025, 1024),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": MANY_IDS * 4}, "label_token_ids", 1028, 1024),
    ("/vertex", {"instances": [{"inputs": "a"}] * 1025}, "instances", 1025, 1024),
    ("/parse_function_call", {"text": "a", "tools": MANY_TOOLS}, "tools", MOST_TOOLS + 1, MOST_TOOLS),
]


@pytest.mark.slow
def test_too_many_are_refused_by_field_count_and_limit(live: LiveServer) -> None:
    for path, body, field, count, most in TOO_MANY:
        answer = httpx.post(live.url + path, json=body, timeout=60)
        assert answer.status_code in (400, 422), (path, field, answer.text)
        for words in (field, str(count), str(most)):
            assert words in answer.text, (path, field, answer.text[:300])
        assert len(answer.text) < 1000
    assert not live.double.submits


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * 5000}),
        ("/v1/completions", {"prompt": [[1], [1] * 5000]}),
        ("/generate", {"input_ids": [1] * 5000}),
        ("/generate", {"input_embeds": [[0.0] * 4] * 5000}),
        ("/v1/score", {"query": [1] * 5000, "items": [[1]], "label_token_ids": [1]}),
        ("/v1/score", {"query": [1], "items": [[1] * 5000], "label_token_ids": [1]}),
    ],
)
def test_more_tokens_than_the_context_holds_are_refused_before_they_are_read(
    live: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = live.state.max_model_len
    assert limit is not None
    assert limit < 5000
    monkeypatch.setattr("pydantic.BaseModel.model_validate", lambda *_: pytest.fail("it was read"))
    answer = httpx.post(live.url + path, json=body)
    assert answer.status_code == 400
    assert "5000 tokens" in answer.text
    assert str(limit) in answer.text


def test_prompts_count_for_each_answer(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_limits, "MOST_PROMPT_TOKENS", 1000)
    body = {"prompt": [1] * 100, "n": 10, "max_tokens": 1}
    assert httpx.post(f"{live.url}/v1/completions", json=body).status_code == 200
    for path, more in (
        ("/v1/completions", body | {"n": 11}),
        ("/v1/score", {"query": [1] * 100, "items": [[1]] * 10, "label_token_ids": [1]}),
    ):
        answer = httpx.post(live.url + path, json=more)
        assert answer.status_code == 400
        assert "at most 1000 are possible" in answer.text


def test_prompts_and_messages_together_are_not_read_once_for_each_prompt(live: LiveServer) -> None:
    answer = httpx.post(f"{live.url}/v1/tokenize", json={"prompt": [""] * 1000, "messages": [SAY] * 1000})
    assert answer.status_code == 400
    assert "exclude each other" in answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_token_id_of_many_digits_is_refused(live: LiveServer, path: str) -> None:
    bias = {"9" * 5000: 1.0}
    body = (
        {"prompt": "a", "logit_bias": bias}
        if path != "/generate"
        else {"text": "a", "sampling_params": {"logit_bias": bias}}
    )
    answer = httpx.post(live.url + path, json=body)
    assert answer.status_code == 400
    assert "logit_bias" in answer.text
    assert len(answer.text) < 500


class Name(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def comparisons(job: Any) -> int:
    Name.compared = 0
    job()
    return Name.compared


def test_names_of_tools_are_compared_a_few_times_each() -> None:
    count = 1000
    listed = [{"type": "function", "function": {"name": Name(f"f{i}")}} for i in range(count)]
    named = [{"type": "function", "function": {"name": Name(f"f{i}")}} for i in range(count)]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    assert comparisons(lambda: tool_use(listed, None)) <= 10 * count
    assert comparisons(lambda: tool_use(listed, allowed)) <= 10 * count
    assert comparisons(lambda: tool_use(listed, "required")) <= 10 * count
    with pytest.raises(RequestFailed, match=r"tools\[1000\].*again"):
        tool_use([*listed, named[3]], None)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "pythonic", "deepseek_v3"])
def test_names_of_parameters_are_compared_a_few_times_each(name: str) -> None:
    count = 1000
    properties = {Name(f"p{i}"): {"type": "string"} for i in range(count)}
    schema = {"type": "object", "properties": properties, "required": [Name(f"p{i}") for i in range(count)]}
    grammar = CallGrammar(TOOL_FORMATS[name], lambda _: None)
    assert comparisons(lambda: grammar.source({"f": schema}, True, None)) <= 20 * count
    schemas: dict[str, Any] = {Name(f"f{i}"): {} for i in range(count)}
    strict = frozenset(Name(f"f{i}") for i in range(count))
    assert comparisons(lambda: strict_tags(TOOL_FORMATS[name], schemas, strict)) <= 20 * count
