"""What the dialects add beyond plain text, on a real server against transformers; and asynchronous clients."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from huggingface_hub import AsyncInferenceClient
from transformers import AutoModelForCausalLM

from tests.system.server import Server

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def forward(reference: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return reference(torch.tensor([ids]), output_hidden_states=True)


def tokens(count: int) -> list[int]:
    return [random.randrange(3, 400) for _ in range(count)]


def test_evaluations_get_the_models_loglikelihoods(server: Server, reference: Any) -> None:
    """The request that lm-eval's `local-completions` sends, and what it reads of the answer."""
    pairs = [(tokens(random.randint(1, 40)), tokens(random.randint(1, 12))) for _ in range(6)]
    prompts = [context + continuation for context, continuation in pairs]
    body = {
        "model": "",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = sorted(server.post("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    for (context, continuation), prompt, choice in zip(pairs, prompts, choices, strict=True):
        wanted = torch.log_softmax(forward(reference, prompt).logits[0, :-1].double(), -1)[len(context) - 1 :]
        own = wanted.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        told = choice["logprobs"]["token_logprobs"][len(context) : -1]
        assert sum(told) == pytest.approx(float(own.sum()), abs=TOLERANCE)
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][len(context) : -1]]
        assert [a == b for a, b in zip(told, best, strict=True)] == (own == wanted.max(-1).values).tolist()


def test_scores_are_the_models_probabilities(server: Server, reference: Any) -> None:
    query, items, labels = tokens(5), [tokens(3), tokens(8)], random.sample(range(400), 4)
    for softmax in (False, True):
        body = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": softmax}
        for item, scores in zip(items, server.post("/v1/score", body)["scores"], strict=True):
            logits = forward(reference, query + item).logits[0, -1].double()
            wanted = torch.softmax(logits[labels] if softmax else logits, -1)
            assert scores == pytest.approx((wanted if softmax else wanted[labels]).tolist(), abs=TOLERANCE)


def test_hidden_states_and_vectors_over_http(target: Server, reference: Any) -> None:
    ids = tokens(20)
    sampling = {"temperature": 0, "max_new_tokens": 5}
    answer = target.post("/generate", {"input_ids": ids, "sampling_params": sampling, "return_hidden_states": True})
    prompt, *rest = answer["meta_info"]["hidden_states"]
    wanted = forward(reference, ids + answer["output_ids"][:-1]).hidden_states[-1][0].numpy()
    np.testing.assert_allclose(np.array([*prompt, *rest]), wanted, atol=TOLERANCE)
    vectors = reference.get_input_embeddings().weight.detach()[ids].tolist()
    same = target.post("/generate", {"input_embeds": vectors, "sampling_params": sampling})
    assert same["output_ids"] == answer["output_ids"]
    again = target.post("/generate", {"input_embeds": vectors, "sampling_params": sampling})
    assert (again["output_ids"], again["meta_info"]["cached_tokens"]) == (answer["output_ids"], 16)


def test_a_session_goes_on_where_it_was(target: Server) -> None:
    session = target.post("/open_session", {"capacity_of_str_len": 1000})
    sampling = {"temperature": 0, "max_new_tokens": 8}

    def turn(ids: list[int], name: str, **params: Any) -> Any:
        body = {"input_ids": ids, "rid": name, "session_params": {"id": session, **params}, "sampling_params": sampling}
        return target.post("/generate", body)

    first, second = tokens(30), tokens(7)
    one = turn(first, "one")["output_ids"]
    two = turn(second, "two", rid="one")
    plain = target.post("/generate", {"input_ids": first + one + second, "sampling_params": sampling})
    assert two["output_ids"] == plain["output_ids"]
    assert two["meta_info"]["prompt_tokens"] == 45
    assert two["meta_info"]["cached_tokens"] >= 32
    branch = turn(second, "three", rid="one", drop_previous_output=True)
    plain = target.post("/generate", {"input_ids": first + second, "sampling_params": sampling})
    assert branch["output_ids"] == plain["output_ids"]


async def test_asynchronous_clients(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        ask: dict[str, Any] = {"model": "", "prompt": tokens(9), "max_tokens": 12, "seed": 3}
        answers = await asyncio.gather(*(client.completions.create(**ask) for _ in range(6)))
        assert len({answer.choices[0].text for answer in answers}) == 1
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == answers[0].choices[0].text
    async with AsyncInferenceClient(server.url) as hub:
        whole = await hub.text_generation("Größe 日本", max_new_tokens=9, details=True)
        pieces = [
            piece
            async for piece in await hub.text_generation("Größe 日本", max_new_tokens=9, details=True, stream=True)
        ]
        assert [piece.token.id for piece in pieces] == [token.id for token in whole.details.tokens]
        assert pieces[-1].generated_text == whole.generated_text
