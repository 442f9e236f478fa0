"""Reasoning and tool calls in every chat dialect, with the real clients against the real server."""

from __future__ import annotations

import json
import random
from typing import Any

import anthropic
import httpx
import openai
import pytest

from api_server.answers.formats import AnswerFormats
from api_server.dialects.anthropic.schema import StreamEvent
from api_server.dialects.openai.responses.schema import ResponseEvent
from api_server.dialects.openai.schema import ChatAnswer, ChatChunk
from api_server.text.tokenizer import Tokenizer
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, encode
from tests.api_server.dialects.test_anthropic import events_of, prompt_of
from tests.api_server.dialects.test_openai import post, says

USER: Any = [{"role": "user", "content": "hi"}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
OWN_TOOL: Any = {"name": "get_weather", "input_schema": PARAMETERS}
FLAT_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
ARGUMENTS = [{"city": 'Zürich "x" 日本'}, {"city": ""}]
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(each, ensure_ascii=False)}}}\n</tool_call>'
    for each in ARGUMENTS
)
ANSWER = f"<think>\nWhat weather? 🌦\n</think>\n\nLet me see.\n{CALLS}"


@pytest.fixture(autouse=True)
def formats(live: LiveServer, tokenizer: Tokenizer) -> None:
    """The template of these tests shows reasoning, but no calls."""
    live.state.formats = AnswerFormats.of(Settings(tool_parser="hermes"), tokenizer)
    live.double.step_seconds = random.choice([0.0, 0.001])
    live.double.max_model_len = 2048
    live.double.wait(lambda: live.state.max_model_len == 2048)


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def messenger(live: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": USER, "tools": [TOOL], "max_tokens": 600, **more}


def test_a_chat_with_reasoning_text_and_calls(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, ANSWER)
    whole = post(live, "/v1/chat/completions", chat()).json()
    assert ChatAnswer.model_validate(whole)
    choice = whole["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == message["reasoning"] == "What weather? 🌦"
    assert message["content"] == "Let me see."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == ARGUMENTS
    thought = ANSWER.partition("\n\nLet")[0]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thought.encode()) - len("<think")}
    text = post(live, "/v1/chat/completions", chat(stream=True)).text
    frames = [json.loads(frame[6:]) for frame in text.split("\n\n") if frame.startswith("data: {")]
    assert all(ChatChunk.model_validate(frame) for frame in frames)
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert frames[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for index, call in enumerate(message["tool_calls"]):
        pieces = [each for delta in deltas for each in delta.get("tool_calls", ()) if each["index"] == index]
        assert pieces[0]["function"]["name"] == call["function"]["name"]
        assert pieces[0]["id"]
        assert all("id" not in piece and "name" not in piece["function"] for piece in pieces[1:])
        assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]


def test_openais_client_puts_the_stream_together(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, ANSWER)
    with client.chat.completions.stream(model="", messages=USER, tools=[TOOL], max_tokens=600) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "Let me see.")
    assert [json.loads(call.function.arguments) for call in final.message.tool_calls or ()] == ARGUMENTS


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "none"}, {"content": f"Let me see.\n{CALLS}", "reasoning": "What weather? 🌦"}),
        ({"tools": None}, {"content": f"Let me see.\n{CALLS}", "reasoning": "What weather? 🌦"}),
        ({"separate_reasoning": False, "tools": None}, {"content": ANSWER}),
    ],
)
def test_what_is_not_asked_for_stays_text(
    live: LiveServer, tokenizer: Tokenizer, more: dict[str, Any], message: dict[str, str]
) -> None:
    says(live.double, tokenizer, ANSWER)
    choice = post(live, "/v1/chat/completions", chat(**more)).json()["choices"][0]
    assert {name: choice["message"].get(name) for name in ("content", "reasoning")} == {"reasoning": None} | message
    assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("stop", None)


def test_one_call_is_enough(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, ANSWER + "x" * 100)
    for stream in (False, True):
        answer = post(live, "/v1/chat/completions", chat(parallel_tool_calls=False, stream=stream)).text
        assert "get_weather" in answer
        assert answer.count('"name":"get_weather"') == 1
        assert '"finish_reason":"tool_calls"' in answer
    live.double.wait(lambda: len(live.double.cancelled) == 2)


def test_reasoning_at_once(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, ANSWER)
    text = post(live, "/v1/chat/completions", chat(stream=True, stream_reasoning=False)).text
    assert text.count('"reasoning":') == 1
    assert '"reasoning":"What weather? 🌦"' in text


@pytest.mark.parametrize("budget", [1, 5, 12])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_budget_ends_reasoning(live: LiveServer, tokenizer: Tokenizer, budget: int, logprobs: bool) -> None:
    thought = "abcdefghijklmnopqrstuvwxyz" * 4
    opened = encode(tokenizer, "<think>")
    ids = [*opened, *encode(tokenizer, thought)]
    closing = encode(tokenizer, "\n</think>\n\n")
    rest = [*encode(tokenizer, "Yes."), tokenizer.eos_token_ids[0]]

    def answer(submit: Any) -> list[int]:
        told = submit.context.tokens.generated.tolist()
        return [*told, *rest] if closing[0] in told else [*ids, *rest]

    live.double.answer = answer
    live.double.steps = 1
    # An answer that has begun goes on, however full the queue is.
    live.double.full_from = 1
    body = chat(tools=None, max_thinking_tokens=budget, logprobs=logprobs)
    whole = post(live, "/v1/chat/completions", body).json()
    live.double.full_from = None
    message = whole["choices"][0]["message"]
    kept = budget - 1  # the token that completes the marker is the first that counts
    assert message["content"] == "Yes."
    assert message.get("reasoning", "") == tokenizer._backend.decode(ids[len(opened) : len(opened) + kept])
    first, second = live.double.submits
    assert second.text.tokens.generated.tolist() == [*ids[: len(opened) + kept], *closing]
    assert first.handle in live.double.cancelled
    if logprobs:
        told = [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]]
        assert len(told) == whole["usage"]["completion_tokens"]
        assert told[len(opened) + kept : len(opened) + kept + len(closing)] == [0.0] * len(closing)
    assert "Yes." in "".join(
        json.loads(frame[6:])["choices"][0]["delta"].get("content") or ""
        for frame in post(live, "/v1/chat/completions", body | {"stream": True}).text.split("\n\n")
        if frame.startswith("data: {")
    )


def test_a_budget_in_sglangs_own_dialect(live: LiveServer, tokenizer: Tokenizer) -> None:
    """The text stays as it is, with the marks in it."""
    thought, closing = encode(tokenizer, "abcdefghij" * 3), encode(tokenizer, "\n</think>\n\n")
    rest = [*encode(tokenizer, "Yes."), tokenizer.eos_token_ids[0]]

    def answer(submit: Any) -> list[int]:
        told = submit.context.tokens.generated.tolist()
        return [*told, *rest] if told else [*thought, *rest]

    live.double.answer = answer
    live.double.guesses = [9, 3]
    body = {"text": "Why? <think>\n", "sampling_params": {"max_new_tokens": 200}, "max_thinking_tokens": 4}
    found = post(live, "/generate", body).json()
    kept = tokenizer._backend.decode(thought[:4])
    assert found["text"] == f"{kept}\n</think>\n\nYes."
    assert found["output_ids"] == [*thought[:4], *closing, *rest]
    end = next(i for i in range(len(closing) + 1) if "</think>" in tokenizer._backend.decode(closing[:i]))
    assert found["meta_info"]["reasoning_tokens"] == 4 + end
    assert found["meta_info"]["spec_num_proposed_drafts"] == 18, "guesses before the end of the budget count, too"
    assert found["meta_info"]["spec_num_correct_drafts"] == 6
    found = post(live, "/generate", body | {"max_thinking_tokens": None}).json()
    assert (found["text"], found["meta_info"]["reasoning_tokens"]) == ("abcdefghij" * 3 + "Yes.", 0)


def test_a_message_of_anthropics(messenger: anthropic.Anthropic, live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, ANSWER)
    asked: dict[str, Any] = {"model": "", "max_tokens": 600, "messages": USER, "tools": [OWN_TOOL]}
    message = messenger.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert [block.input for block in message.content if block.type == "tool_use"] == ARGUMENTS
    with messenger.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()

    def facts(given: anthropic.types.Message) -> Any:
        return [{**block.model_dump(), "id": ""} for block in given.content]

    assert facts(streamed) == facts(message)
    assert streamed.stop_reason == "tool_use"
    events = events_of(post(live, "/v1/messages", asked | {"model": "tiny-chat", "stream": True}).text)
    for event in events:
        assert StreamEvent.model_validate(event).model_dump(exclude_unset=True) == event
    indices = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert indices == [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]


def test_results_go_back_through_the_template(live: LiveServer, tokenizer: Tokenizer) -> None:
    """One history in three dialects is one prompt."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    openais: Any = [
        *USER,
        {"role": "assistant", "content": "So.", "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    anthropics: Any = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    ]
    items: Any = [
        *USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.reasoning_content }}:{{ m.tool_call_id }}:"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %};"
        "{% endfor %}{{ tools | tojson }}"
    )
    own = tokenizer._tokenizer.chat_template
    prompts = []
    try:
        tokenizer._tokenizer.chat_template = template
        for path, body in (
            ("/v1/chat/completions", chat(messages=openais)),
            ("/v1/messages", {"messages": anthropics, "tools": [OWN_TOOL], "max_tokens": 5}),
            ("/v1/responses", {"input": items, "tools": [{k: v for k, v in FLAT_TOOL.items() if k != "strict"}]}),
        ):
            response = post(live, path, body)
            assert response.status_code == 200, response.text
            prompts.append(prompt_of(live, tokenizer))
    finally:
        tokenizer._tokenizer.chat_template = own
    assert prompts[0].startswith("user:hi:::;assistant:So.:hm::c1get_weatherRome;tool:sunny::c1:;[{")
    assert prompts[1:] == prompts[:1] * 2


def test_a_response(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, ANSWER)
    asked: dict[str, Any] = {"model": "", "input": "hi", "tools": [FLAT_TOOL], "max_output_tokens": 600}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "Let me see."
    assert [json.loads(item.arguments) for item in whole.output if item.type == "function_call"] == ARGUMENTS
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = events_of(post(live, "/v1/responses", asked | {"stream": True}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert ResponseEvent.model_validate(event).model_dump(exclude_unset=True) == event
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == [item.type for item in whole.output]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    arguments = ["", ""]
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            arguments[event["output_index"] - 2] += event["delta"]
    assert [json.loads(text) for text in arguments] == ARGUMENTS
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_a_prompt_that_opens_reasoning(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, "hm\n</think>\n\nYes.")
    body = chat(tools=None, chat_template_kwargs={"enable_thinking": True})
    message = post(live, "/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Yes.")
    thinking = {"messages": USER, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    blocks = post(live, "/v1/messages", thinking).json()["content"]
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in blocks] == [
        ("thinking", "hm"),
        ("text", "Yes."),
    ]


def test_a_template_without_a_place_for_tools_is_told_of_them(live: LiveServer, tokenizer: Tokenizer) -> None:
    own = tokenizer._tokenizer.chat_template
    try:
        tokenizer._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert post(live, "/v1/chat/completions", chat(tool_prompt="Call one:")).status_code == 200
        prompt = prompt_of(live, tokenizer)
    finally:
        tokenizer._tokenizer.chat_template = own
    assert prompt.startswith("hi\n---\nCall one:\n[{")
    assert json.loads(prompt.partition("Call one:\n")[2]) == [TOOL["function"]]


def test_calls_in_a_text_that_was_made_elsewhere(live: LiveServer) -> None:
    body = {"text": f"So.\n{CALLS}", "tools": [TOOL], "tool_call_parser": "qwen25"}
    answer = post(live, "/parse_function_call", body).json()
    assert answer["normal_text"] == "So."
    assert [(c["tool_index"], c["name"], json.loads(c["parameters"])) for c in answer["calls"]] == [
        (0, "get_weather", ARGUMENTS[0]),
        (1, "get_weather", ARGUMENTS[1]),
    ]
    assert post(live, "/parse_function_call", {"text": CALLS}).json()["calls"] == answer["calls"]
    for path, wrong in (
        ("/parse_function_call", {"text": "x", "tool_call_parser": "telepathy"}),
        ("/parse_function_call", {"text": 5}),
        ("/parse_function_call", {"text": "x", "tools": ["y"]}),
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "telepathy"}),
    ):
        refused = post(live, path, wrong)
        assert refused.status_code == 400
        assert list(wrong)[-1] in refused.json()["error"]["message"]


def test_reasoning_in_a_text_that_was_made_elsewhere(live: LiveServer) -> None:
    body = {"text": "hm</think>Yes.", "reasoning_parser": "deepseek-r1", "return_blocks": True}
    assert post(live, "/separate_reasoning", body).json() == {
        "reasoning_text": "hm",
        "text": "Yes.",
        "reasoning_blocks": ["hm"],
        "text_blocks": ["Yes."],
        "blocks": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "Yes."}],
    }
    assert post(live, "/separate_reasoning", {"text": "<think>a</think>b"}).json() == {
        "reasoning_text": "a",
        "text": "b",
    }


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", chat(tool_choice="nobody"), "tool_choice names 'nobody'"),
        ("/v1/chat/completions", chat(max_thinking_tokens=-1), "max_thinking_tokens"),
        ("/v1/messages", {"messages": USER, "max_tokens": 5, "tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ("/v1/messages", {"messages": USER, "max_tokens": 5, "tools": [{"type": "telepathy"}]}, "tools[0].type"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}], "max_tokens": 5},
            "cannot be in a turn of the user",
        ),
        ("/v1/responses", {"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ("/v1/responses", {"input": [{"type": "function_call"}]}, "input[0].name"),
    ],
)
def test_what_is_wrong_is_400_and_named(live: LiveServer, path: str, body: dict[str, Any], words: str) -> None:
    response: httpx.Response = post(live, path, body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def whole_and_streamed(live: LiveServer, **more: Any) -> tuple[dict[str, Any], str]:
    """The message and its finish reason; streamed, it is the same."""
    choice = post(live, "/v1/chat/completions", chat(**more)).json()["choices"][0]
    raw = post(live, "/v1/chat/completions", chat(stream=True, **more)).text
    frames = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    deltas = [each["delta"] for frame in frames for each in frame["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert arguments == "".join(each["function"]["arguments"] for each in choice["message"].get("tool_calls") or ())
    assert frames[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("stop", ["weather", "\n", "}", "Zürich", "<tool_call>", "</think>", "name"])
def test_stop_strings_match_neither_reasoning_nor_marks_nor_calls(
    live: LiveServer, tokenizer: Tokenizer, stop: str
) -> None:
    says(live.double, tokenizer, ANSWER)
    message, reason = whole_and_streamed(live, stop=[stop])
    assert reason == "tool_calls"
    assert message["content"] == "Let me see."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == ARGUMENTS


def test_a_stop_string_in_the_visible_text_ends_the_answer(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, ANSWER)
    message, reason = whole_and_streamed(live, stop=["me"])
    assert (message["content"], message.get("tool_calls"), reason) == ("Let ", None, "stop")
    kept, _ = whole_and_streamed(live, stop=["me"], include_stop_str_in_output=True)
    assert kept["content"] == "Let me"
    inline, reason = whole_and_streamed(live, stop=["weather"], separate_reasoning=False)
    assert inline["content"].endswith("What ")
    assert reason == "stop"
    pattern, reason = whole_and_streamed(live, stop_regex=["e s"])
    assert pattern["content"].startswith("Let me s")
    assert reason == "stop"


@pytest.mark.slow
def test_a_call_that_is_cut_before_its_name_is_there_is_left_out(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, CALLS)
    found = []
    # In steps shorter than a name.
    for length in range(1, len(encode(tokenizer, CALLS)), 4):
        message, reason = whole_and_streamed(live, max_tokens=length)
        found.append(len(message.get("tool_calls") or ()))
        assert reason == "length"
        assert not message["content"] or "<tool_call>".startswith(message["content"])
    assert sorted(found) == found
    assert {0, 1, 2} == set(found)
