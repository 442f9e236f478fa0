"""The model's tokenizer as the server uses it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from api_server.body.item_limits import MAX_TEXT
from api_server.errors import ErrorKind, RequestFailed
from api_server.text import tokenizer as tokenizer_module
from api_server.text.tokenizer import Tokenizer
from interfaces.base.request_id import RequestID
from interfaces.request.requests import TextGenerationRequest
from tests.api_server.conftest import CORPUS, encode


def request(prompt: Any, **more: Any) -> TextGenerationRequest:
    return TextGenerationRequest(request_id=RequestID("r"), prompt=prompt, **more)


async def test_text_ids_and_truncation(tokenizer: Tokenizer) -> None:
    text = CORPUS[0]
    prompt = await tokenizer.prompt(request(text), 1000)
    assert (prompt.text, prompt.tokens.tolist()) == (text, encode(tokenizer, text))
    assert (await tokenizer.prompt(request([5, 6, 7]), 1000)).tokens.tolist() == [5, 6, 7]
    for asked in (text, encode(tokenizer, text)):
        kept = await tokenizer.prompt(request(asked, truncate_prompt_to=4), 1000)
        assert kept.tokens.tolist() == encode(tokenizer, text)[-4:]


async def test_an_endless_text_is_refused_without_tokenizing(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestFailed) as caught:
        await tokenizer.prompt(request("x" * 100_000), 50)
    assert caught.value.kind is ErrorKind.TOO_LONG
    assert caught.value.numbers["limit"] == 50
    # But never one that might fit: here every token is as long as tokens get.
    longest = max(tokenizer._backend.get_vocab(), key=len)
    await tokenizer.prompt(request(longest * 50), 50)


LONG = "word " * (MAX_TEXT // 8)


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [{"role": "user", "content": LONG}] * 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}] * 2}]},
        {"messages": [{"role": "assistant", "reasoning_content": LONG, "content": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": LONG * 2}}]}]},
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"function": {"name": "f", "description": LONG * 2}}],
        },
        {"messages": [{"role": "user", "content": "x"}], "chat_template_options": {"more": LONG * 2}},
    ],
)
async def test_endless_messages_are_refused_before_a_template_sees_them(
    tokenizer: Tokenizer, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api_server.chat.template.render", lambda *_: pytest.fail("it was rendered"))
    for limit in (None, 4096):
        with pytest.raises(RequestFailed) as caught:
            await tokenizer.prompt(TextGenerationRequest(RequestID("a"), **given), limit)
        assert caught.value.kind is ErrorKind.TOO_LONG
        assert f"at most {MAX_TEXT} are possible" in caught.value.message


async def test_the_queue_for_threads_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_JOBS", 3)
    jobs = [asyncio.ensure_future(tokenizer.prompt(request("x" * 1000), None)) for _ in range(10)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    refused = [error for error in results if isinstance(error, RequestFailed)]
    assert [error.kind for error in refused] == [ErrorKind.OVERLOADED] * 7
    assert (await tokenizer.prompt(request("x"), None)).tokens.tolist() == encode(tokenizer, "x")


async def test_many_threads_agree_with_one(tokenizer: Tokenizer) -> None:
    texts = [CORPUS[i % 3][i % 7 :] for i in range(200)]
    prompts = await asyncio.gather(*(tokenizer.prompt(request(text), None) for text in texts))
    assert [p.tokens.tolist() for p in prompts] == [encode(tokenizer, text) for text in texts]


async def test_spans_and_decode(tokenizer: Tokenizer) -> None:
    text = "Größe 日本"
    spans = await tokenizer.spans(text)
    assert [span.id for span in spans] == encode(tokenizer, text)
    assert spans[0].start == 0
    assert spans[-1].stop == len(text)
    assert await tokenizer.decode([span.id for span in spans]) == text
    with pytest.raises(RequestFailed, match="ids are 0 to"):
        await tokenizer.decode([tokenizer.vocab_size])


def test_eos_ids_are_those_of_tokenizer_and_generation_config(tokenizer: Tokenizer) -> None:
    im_end = tokenizer._backend.token_to_id("<|im_end|>")
    assert tokenizer.eos_token_ids == [im_end, 0]
    assert tokenizer.defaults.eos_token_id == [im_end, 0]
    assert (tokenizer.defaults.top_k, tokenizer.defaults.temperature) == (20, None)
    assert tokenizer.is_special(im_end)
    assert not tokenizer.is_special(encode(tokenizer, "x")[0])


@pytest.mark.parametrize("config", [None, "{", "[]", json.dumps({"eos_token_id": None})])
def test_a_missing_or_odd_generation_config_changes_nothing(
    model_directory: Path, tmp_path: Path, config: str | None
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model_directory, copy)
    (copy / "generation_config.json").unlink()
    if config is not None:
        (copy / "generation_config.json").write_text(config)
    loaded = Tokenizer.load(str(copy))
    assert loaded.eos_token_ids == [loaded._backend.token_to_id("<|im_end|>")]
    assert loaded.defaults.top_k is None
    loaded.close()


def test_a_directory_without_tokenizer_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        Tokenizer.load(str(tmp_path))
