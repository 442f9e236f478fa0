"""Which formats a chat template shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_server.parsers import detection, registry

DEEPSEEK = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + %s + '<｜tool▁sep｜>' + %s }}<think></think>"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "llama3_json", None),
        ("<tool_call>{{ tool_call | tojson }}</tool_call>", "hermes", None),
        ("<tool_call><function={{ name }}> </think>", "qwen3_coder", "think"),
        ("<tool_call>{{ name }}<arg_key> <think>", "glm45", "think"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }} [THINK]", "mistral", "mistral"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral_list", None),
        (DEEPSEEK % ("type", "name + '\\n```json\\n'"), "deepseek_v3", "think"),
        (DEEPSEEK % ("name", "arguments"), "deepseek_v31", "think"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|tool_call|> Here is my thought process: ", "granite", "granite"),
        ("<|python_tag|> {{ tools }}", "llama3_json", None),
        ("<|python_start|>", "pythonic", None),
        ("<|start|>assistant<|channel|>analysis<|message|> <|constrain|>json", "harmony", "harmony"),
    ],
)
def test_signs(template: str, tools: str, reasoning: str | None) -> None:
    found = detection.reasoning_of(template)
    assert (detection.tools_of(template).name, found and found.name) == (tools, reasoning)


def test_the_embedded_model() -> None:
    template = Path("deploy/embedded_model/weights/chat_template.jinja").read_text()
    found = detection.reasoning_of(template)
    assert (detection.tools_of(template).name, found and found.name) == ("hermes", "think")


@pytest.mark.parametrize(
    ("given", "name"),
    [("qwen25", "hermes"), ("llama3", "llama3_json"), ("gpt-oss", "harmony"), ("deepseekv31", "deepseek_v31")],
)
def test_names_of_other_servers(given: str, name: str) -> None:
    assert registry.tool_format(given).name == name


def test_a_name_that_is_none_is_told_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"tool_parser must be one of hermes.*got 'telepathy'"):
        registry.tool_format("telepathy")
    with pytest.raises(ValueError, match=r"reasoning_parser must be one of think.*got 'telepathy'"):
        registry.reasoning_format("telepathy")
    assert registry.reasoning_format("deepseek-r1").inside
    assert registry.reasoning_format("qwen3").name == "think"
