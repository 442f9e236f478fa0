"""A served model with recurrent layers: streams go on behind a worker that is killed, and have the bytes of others."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from tests.api_server.conftest import CHATML, byte_level_backend
from tests.chaos.streams import Heard, Request, completion_facts
from tests.chaos.waves import compare, run
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.system.server import Server

STREAMS = 8
LENGTH = 200
# A prompt takes several steps. The worker has one epoch after another; what it cannot do is asked for and ignored.
FLAGS = ["--dtype", "float32", "--kv-memory", "64MB", "--max-batch-tokens", "64", "--speculate", "auto"]


def requests() -> list[Request]:
    """Sampled ones, which begin alike."""
    body = {"stream": True, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 1}
    text = "All of them begin with these words. " * 4
    return [
        Request("/v1/completions", {**body, "prompt": f"{text}{number}", "seed": number}, completion_facts)
        for number in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    backend = byte_level_backend()
    folder = tmp_path_factory.mktemp("hybrid")
    values = {"vocab_size": backend.get_vocab_size(), "eos_token_id": 2, "max_position_embeddings": 2048}
    path = tiny_hybrid("qwen3_5_text", folder, **values)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML).save_pretrained(
        path
    )
    spill = ["--kv-spill", "1MB", "--kv-spill-dir", str(folder / "spill")]
    with Server(path, [*FLAGS, *spill], folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(hybrid: Server) -> list[Heard]:
    return run(hybrid, requests())


def test_nothing_is_reused_or_guessed(hybrid: Server, undisturbed: list[Heard]) -> None:
    assert [one.problem for one in undisturbed] == [""] * STREAMS
    names = "tokenyard_cached_prompt_tokens_total", "tokenyard_worker_draft_tokens_total"
    assert hybrid.totals(*names) == [0, 0]
    log = hybrid.log.read_text()
    assert "kv_spill is ignored" in log
    assert "nothing is guessed" in log


def test_streams_of_a_worker_that_is_killed_lose_nothing(hybrid: Server, undisturbed: list[Heard]) -> None:
    recovered = hybrid.total("tokenyard_scheduler_recovered_total")

    def kill(server: Server) -> None:
        server.wait_for("all run", 60, lambda: server.total("tokenyard_requests_running") == STREAMS)
        server.child("model_worker").send_signal(signal.SIGKILL)

    outcome = compare(requests(), undisturbed, run(hybrid, requests(), kill))
    assert outcome.clean, f"{outcome}\n{hybrid.log.read_text()}"
    hybrid.wait_for("the count", 60, lambda: hybrid.total("tokenyard_scheduler_recovered_total") >= recovered + STREAMS)


def test_choices_of_one_prompt_are_computed_each(hybrid: Server) -> None:
    body = {"prompt": "One of several. " * 6, "max_tokens": 12, "n": 3, "temperature": 1, "seed": 3, "ignore_eos": True}
    answer = hybrid.post("/v1/completions", body)
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    again = hybrid.post("/v1/completions", body)
    assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in answer["choices"]]
    assert not (again["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
