"""Real clients against the real server: openai, anthropic and huggingface_hub, streaming and not."""

from __future__ import annotations

import concurrent.futures
import json
import random
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from huggingface_hub import InferenceClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.system.server import Server
from tests.system.test_resilience import last_frame, open_stream


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def generate(model: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def test_concurrent_greedy_requests_equal_generate(server: Server, model: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 400) for _ in range(rng.randint(2, 120))] for _ in range(16)]
    wanted = generate(model, prompts, 30)

    def ask(prompt: list[int]) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": 30}
        return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})["output_ids"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == wanted, f"seed {seed}"


@pytest.mark.parametrize("seed", [0, 12345])
def test_a_streamed_chat_is_the_unstreamed_one(client: openai.OpenAI, seed: int) -> None:
    ask: dict[str, Any] = {
        "model": "",
        "messages": [{"role": "user", "content": "Größe? 日本語 😀"}],
        "max_tokens": 60,
        "seed": seed,
        "temperature": 0.9,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_n_choices_differ_and_repeat_with_the_seed(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(model="", prompt="Hello", max_tokens=12, n=3, seed=5)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 36
        return [choice.text for choice in answer.choices]

    assert ask() == ask()
    assert len(set(ask())) == 3


def test_stop_strings_cut_the_stream_and_the_answer_alike(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "", "prompt": "The fox", "max_tokens": 80, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[20:23]
    wanted = whole[: whole.index(stop)]
    answer = client.completions.create(**ask, stop=[stop]).choices[0]
    assert (answer.text, answer.finish_reason) == (wanted, "stop")
    chunks = list(client.completions.create(**ask, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_hugging_face_client_is_at_home(server: Server) -> None:
    hf = InferenceClient(base_url=server.url, timeout=60)
    details = hf.text_generation("Hello", details=True, max_new_tokens=10)
    assert details.details is not None
    assert details.details.generated_tokens == 10
    assert details.details.finish_reason == "length"
    streamed = list(hf.text_generation("Hello", details=True, stream=True, max_new_tokens=10))
    assert streamed[-1].generated_text == details.generated_text
    assert [t.token.id for t in streamed] == [t.id for t in details.details.tokens]
    chat = hf.chat_completion([{"role": "user", "content": "hi"}], max_tokens=5)
    assert chat.usage.completion_tokens == 5


def test_one_conversation_has_one_answer_in_every_chat_dialect(server: Server, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"Größe {random.randrange(10**6)}? " + "日本語 😀 " * 8}]
    ask: dict[str, Any] = {"model": "", "temperature": 0}
    chat = client.chat.completions.create(**ask, messages=messages, max_tokens=40)
    response = client.responses.create(**ask, input=messages, max_output_tokens=40)
    messenger = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    plain: dict[str, Any] = {"model": "", "messages": messages, "max_tokens": 40, "extra_body": {"temperature": 0}}
    message = messenger.messages.create(**plain)
    with messenger.messages.stream(**plain) as stream:
        streamed = "".join(stream.text_stream)
    block = message.content[0]
    assert block.type == "text"
    assert chat.choices[0].message.content == response.output_text == block.text == streamed
    assert chat.usage is not None
    assert response.usage is not None
    counted = messenger.messages.count_tokens(model="", messages=messages).input_tokens
    cached = message.usage.cache_read_input_tokens
    assert cached == response.usage.input_tokens_details.cached_tokens > 0
    assert chat.usage.prompt_tokens == response.usage.input_tokens == message.usage.input_tokens + cached == counted
    assert chat.usage.completion_tokens == response.usage.output_tokens == message.usage.output_tokens


def test_a_repeated_prompt_comes_from_the_prefix_cache(server: Server) -> None:
    prompt = random.sample(range(3, 400), 100)
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    first, second = server.post("/generate", body), server.post("/generate", body)
    assert first["output_ids"] == second["output_ids"]
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 96


def test_a_flushed_cache_is_empty(server: Server) -> None:
    body = {"input_ids": random.sample(range(3, 400), 100), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    first = server.post("/generate", body)
    with urllib.request.urlopen(f"{server.url}/flush_cache?timeout=20", timeout=30) as response:
        assert response.read() == b"Cache flushed.\n"
    second = server.post("/generate", body)
    assert second["meta_info"]["cached_tokens"] == 0
    assert first["output_ids"] == second["output_ids"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_token(server: Server, mode: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
    body = {"input_ids": random.sample(range(3, 400), 60), "sampling_params": sampling}
    undisturbed = server.post("/generate", body)["output_ids"]
    connection, response = open_stream(server, body | {"stream": True})
    assert response.readline().startswith(b"data: {")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert server.post("/pause_generation", {"mode": mode})["status"] == "ok"
        future = pool.submit(last_frame, response)
        time.sleep(0.3)
        early = future.done()
        assert server.post("/continue_generation", {})["status"] == "ok"
        assert not early
        assert future.result(60)["output_ids"] == undisturbed
    connection.close()


def test_an_aborted_request_answers_with_what_it_has(server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "rid": "to-abort", "stream": True, "sampling_params": sampling}

    def sent(path: str, body: Any) -> Any:
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=60)

    with sent("/generate", body) as stream:
        first = json.loads(stream.readline().removeprefix(b"data: "))
        sent("/abort_request", {"rid": "to-a"}).close()
        frames = [line for line in stream if line.startswith(b"data: {")]
    last = json.loads(frames[-1].removeprefix(b"data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert first["meta_info"]["completion_tokens"] <= last["meta_info"]["completion_tokens"] < 900
    assert last["text"].startswith(first["text"])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", {"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}, 404, "gpt-9"),
        ("/v1/chat/completions", {"messages": []}, 400, "essages"),
        ("/v1/completions", {"prompt": [5] * 5000}, 400, "5000"),
        ("/v1/completions", {"prompt": [1, 2, 99999]}, 400, "99999"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("/generate", {"inputs": "x", "text": "y"}, 422, "both"),
        ("/generate", {"inputs": "x", "parameters": {"temperature": 0}}, 422, "temperature"),
        ("/generate", {"text": "x", "sampling_params": {"top_p": 0}}, 400, "top_p"),
    ],
)
def test_bad_requests_get_an_error_that_names_the_field(
    server: Server, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post(path, body)
    assert refused.value.code == status
    assert words in json.dumps(json.load(refused.value))


def test_the_facts_pages(server: Server) -> None:
    for path in ("/health", "/ready", "/info", "/v1/models", "/metrics", "/docs", "/openapi.json", "/"):
        with urllib.request.urlopen(server.url + path, timeout=10) as response:
            assert response.status == 200, path


def test_the_tokenizer_round_trips(server: Server, model: Path) -> None:
    tokens = server.post("/tokenize", {"inputs": "naïve 😀 fox"})
    wanted = AutoTokenizer.from_pretrained(model)("naïve 😀 fox")["input_ids"]
    assert [token["id"] for token in tokens] == wanted


def test_scores_equal_transformers(server: Server, client: openai.OpenAI, model: Path) -> None:
    """An evaluation's request: the prompt echoed with its log-probabilities, twice, so that its blocks are cached."""
    rng = random.Random(random.randrange(2**31))
    prompt = [rng.randrange(3, 400) for _ in range(90)]
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for count in (1, 0):
        told = (
            client.completions.create(model="", prompt=prompt, max_tokens=count, echo=True, logprobs=2, temperature=0)
            .choices[0]
            .logprobs
        )
        assert told is not None
        assert told.token_logprobs is not None
        assert len(told.token_logprobs) == 90 + count
        with torch.inference_mode():
            wanted = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), -1)
        own = wanted[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert told.token_logprobs[:90] == [None, *(pytest.approx(value, abs=1e-3) for value in own)]
    parameters = {"max_new_tokens": 3, "decoder_input_details": True, "top_n_tokens": 2}
    details = server.post("/generate", {"inputs": "Hello there", "parameters": parameters})["details"]
    assert [token["logprob"] is None for token in details["prefill"]] == [True] + [False] * (
        len(details["prefill"]) - 1
    )
    assert [row[0]["id"] for row in details["top_tokens"]] == [token["id"] for token in details["tokens"]]
