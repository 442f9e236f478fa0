"""A server that guesses, with every drafter at once: killed processes change no byte, and a wrong head is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.model_worker.drafters.heads import PLAIN, random_weights, write_head
from tests.system.server import Server
from tests.system.test_resilience import last_frame, open_stream

LENGTH = 240
PROMPT = [7 + i * 11 % 400 for i in range(40)]


@pytest.fixture(scope="module")
def guessing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guessing")
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    head = write_head(folder / "head", random_weights(3, vocab=vocab), {**PLAIN, "vocab_size": vocab})
    # What the head keeps of 16 rows is taken from the KV memory: what is left makes rows wait and be preempted.
    flags = ["--dtype", "float32", "--max-batch-tokens", "48", "--max-running", "16", "--kv-memory", "7MiB"]
    with Server(model, [*flags, "--speculate", "4", "--draft", f"text,suffix,{head}"], folder / "log") as running:
        yield running


def bodies() -> list[dict[str, Any]]:
    """Greedy, drawn, with a grammar, and with penalties; some of them begin alike."""
    common = {"max_new_tokens": LENGTH, "ignore_eos": True, "sampling_seed": 3}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0, "regex": "([a-z]{3}-){200}"},
        {"temperature": 0.5, "frequency_penalty": 0.4, "top_p": 0.9},
    ]
    return [
        {"input_ids": [*PROMPT, 9 + i // 2], "stream": True, "sampling_params": common | kinds[i % 4]} for i in range(8)
    ]


def answers(server: Server, kill: tuple[str, ...] = ()) -> list[list[int]]:
    """The tokens of all streams at once. Each of `kill` is killed in turn while they run."""

    def read(place: int, body: dict[str, Any]) -> list[int]:
        def disturb(count: int) -> None:
            for nth, module in enumerate(kill):
                if place == 0 and count == 10 + 20 * nth:
                    server.child(module).send_signal(signal.SIGKILL)

        connection, response = open_stream(server, body)
        frame = last_frame(response, disturb)
        connection.close()
        tokens: list[int] = frame["output_ids"]
        return tokens

    asked = bodies()
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(read, range(len(asked)), asked))


def test_killed_processes_change_no_token(server: Server, guessing: Server) -> None:
    wanted = answers(server)
    assert [len(tokens) for tokens in wanted] == [LENGTH] * len(wanted)
    assert answers(guessing) == wanted
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    guessing.wait_for("right guesses in the status", 60, lambda: guessing.total(accepted) > 0)
    assert answers(guessing, ("model_worker", "scheduler")) == wanted
    guessing.wait_for("the server is ready", 60, guessing.is_ready)
    assert answers(guessing, ("scheduler",)) == wanted
