"""Chat messages become the text that the template wants, or an error that names the message."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from api_server.chat import template as templates
from api_server.chat.messages import chat_messages
from api_server.errors import ErrorKind, RequestFailed
from interfaces.base.request_id import RequestID
from interfaces.request.chat import ImageContentPart, TextGenerationRequestMessage
from interfaces.request.requests import TextGenerationRequest
from tests.api_server.conftest import byte_level_backend

PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)


def render(template: str | None, messages: list[Any], **more: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), chat_template=template)
    request = TextGenerationRequest(RequestID("r"), messages=chat_messages(messages), **more)
    return "".join(templates.render(tokenizer, request))


def failure(template: str | None, messages: list[Any], **more: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        render(template, messages, **more)
    return caught.value


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_contents_become_texts() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert render(PLAIN, [user(parts), {"role": "assistant", "content": None}]) == "[user|a\nb\nc][assistant|]"


def test_developer_is_system_unless_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert render(PLAIN, [message]) == "[system|x]"
    assert render("{# developer #}" + PLAIN, [message]) == "[developer|x]"


def test_a_template_that_wants_texts_gets_the_arguments_as_text() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'a:' + c.function.arguments }}"
    template += "{% endfor %}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":"é"}'}}
    assert render(template, [user("x"), {"role": "assistant", "tool_calls": [call]}]) == 'a:{"x": "é"}'
    assert "TypeError" in failure("{{ 'a' + 1 }}", [user("x"), {"role": "assistant", "tool_calls": [call]}]).message


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_the_template_knows(name: str) -> None:
    template = "{% for m in messages %}{{ m." + name + " }};{% endfor %}"
    assert render(template, [user("x"), {"role": "assistant", "content": "y", "reasoning": "hm"}]) == ";hm;"


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [('{"x": 1}', '{"x": 1}'), ({"x": 1}, '{"x": 1}'), ("", "{}"), ("{broken", '"{broken"'), ("[1]", '"[1]"')],
)
def test_arguments_of_calls_are_objects_when_they_can_be(arguments: Any, rendered: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert render(CALLS, [user("x"), {"role": "assistant", "tool_calls": [call]}]) == rendered


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("x", "messages"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "king", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
        ({"role": "user", "content": {"a": 1}}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0].text"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id"),
    ],
)
def test_a_bad_message_is_named(message: Any, field: str) -> None:
    error = failure(PLAIN, [user("x"), message])
    assert (error.kind, error.field) == (ErrorKind.INVALID, field)


def test_further_keys_reach_the_template() -> None:
    assert render("{{ messages[0].name }}", [user("x") | {"name": "Ada"}]) == "Ada"


def test_a_part_that_is_no_text_is_unsupported() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), chat_template=PLAIN)
    message = TextGenerationRequestMessage(role="user", content=[ImageContentPart()])
    with pytest.raises(RequestFailed) as caught:
        templates.render(tokenizer, TextGenerationRequest(RequestID("r"), messages=[message]))
    assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_other_media_are_unsupported() -> None:
    error = failure(PLAIN, [user([{"type": "image_url", "image_url": {"url": "x"}}])])
    assert (error.kind, error.field) == (ErrorKind.UNSUPPORTED, "messages[0].content[0]")


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('only users may speak') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_what_the_template_refuses_is_a_template_error(template: str | None) -> None:
    assert failure(template, [user("x")]).kind is ErrorKind.TEMPLATE


def test_the_templates_own_words_reach_the_client() -> None:
    assert "only users" in failure("{{ raise_exception('only users may speak') }}", [user("x")]).message


def test_continuing_needs_something_to_continue() -> None:
    assert failure(PLAIN, [user("")], continue_final_message=True).kind is ErrorKind.INVALID
    assert render(PLAIN, [user("x"), {"role": "assistant", "content": "so"}], continue_final_message=True) == (
        "[user|x][assistant|so"
    )


def test_options_are_variables_but_none_of_the_functions_own() -> None:
    assert render("{{ mood }}", [user("x")], chat_template_options={"mood": "good"}) == "good"
    for name in ("tokenize", "chat_template", "messages"):
        assert failure(PLAIN, [user("x")], chat_template_options={name: "x"}).kind is ErrorKind.INVALID
