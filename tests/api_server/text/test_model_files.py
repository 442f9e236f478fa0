"""generation_config.json counts as in transformers' generate; end tokens and templates are found where they stand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from api_server.text.model_files import defaults, processor_template, read_generation_config
from api_server.text.tokenizer import Tokenizer
from interfaces import SamplingParamsInput, TextGenerationRequestMessage, combine
from interfaces.base.request_id import RequestID
from interfaces.request.requests import TextGenerationRequest


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", 0, 0.0),
        ("temperature", None, 1.0),
        ("temperature", 2.5, 2.5),
        ("top_p", 1.5, 1.0),
        ("top_p", 0.0, 0.0),
        ("top_k", 0, -1),
        ("top_k", 50.0, 50),
        ("top_k", 10**12, (1 << 31) - 1),
        ("min_p", 0.99, 0.99),
        ("typical_p", 1.0, 1.0),
        ("typical_p", 0.3, 0.3),
        ("repetition_penalty", 1, 1.0),
        ("max_new_tokens", 7, 7),
    ],
)
def test_values_that_can_be_honoured(name: str, value: Any, kept: Any) -> None:
    assert getattr(combine(SamplingParamsInput(), defaults({name: value}, [2])), name) == kept


def test_no_sampling_is_greedy() -> None:
    config = {"do_sample": False, "temperature": 0.6}
    assert combine(SamplingParamsInput(), defaults(config, [])).greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", math.nan),
        ("temperature", -1),
        ("temperature", math.inf),
        ("top_p", True),
        ("top_p", -0.1),
        ("top_k", 1.5),
        ("top_k", -2),
        pytest.param("top_k", 10**400, id="top_k-beyond floats"),
        ("min_p", 1.5),
        ("typical_p", 0),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("max_new_tokens", 0),
        ("do_sample", "yes"),
    ],
)
def test_values_that_generate_refuses_are_refused_by_file_and_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"generation_config.json has {name} .*which must be"):
        defaults({name: value}, [])


@pytest.fixture
def copy(model_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_directory, tmp_path / "model"))


def load(copy: Path, **config: Any) -> Tokenizer:
    (copy / "generation_config.json").unlink(missing_ok=True)
    (copy / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return Tokenizer.load(str(copy))


def test_deeply_nested_files_are_left_out(copy: Path) -> None:
    for name in ("generation_config.json", "chat_template.json"):
        (copy / name).write_text("[" * 100_000)
    (copy / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    assert read_generation_config(str(copy)) == {"eos_token_id": 5}
    assert processor_template(str(copy)) is None


@pytest.mark.parametrize("config", [{"eos_token_id": [5, 7]}, {"text_config": {"eos_token_id": [5, 7]}}])
def test_end_tokens_of_config_json_count_where_no_generation_config_names_any(config: Any, copy: Path) -> None:
    assert load(copy, **config).eos_token_ids[-2:] == [5, 7]


def test_end_tokens_beyond_the_vocabulary_are_ignored_and_others_refused(copy: Path) -> None:
    assert 999_999 not in load(copy, eos_token_id=[5, 999_999]).eos_token_ids
    with pytest.raises(ValueError, match=r"eos_token_id '2', which must be a token id"):
        load(copy, eos_token_id="2")


PARTS = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"


async def test_a_template_that_takes_parts_gets_parts(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(PARTS)
    message = TextGenerationRequestMessage(role="user", content="hello")
    request = TextGenerationRequest(request_id=RequestID("r"), messages=[message])
    assert (await load(copy).prompt(request, None)).text == "<user>hello"


def test_templates_of_a_processor_may_be_a_list(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    assert load(copy).chat_template == "one\ntwo"
