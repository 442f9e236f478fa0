"""Conversations that return after their blocks have left the KV cache: the same tokens, from the disk."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kills import kill_together
from tests.system.server import Server

# A block of 16 tokens takes 12 KB: these are about 40, and a conversation has more than 20.
SMALL = ["--dtype", "float32", "--kv-memory", "500KB", "--max-batch-tokens", "48", "--max-running", "4"]
WORDS = ("yard", "sorts", "cars", "into", "trains", "keeps", "next", "ready", "each", "of", "its", "lines")
ANSWER = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spill") / "kv"


@pytest.fixture(scope="module")
def spilling(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*SMALL, "--kv-spill", "20MB", "--kv-spill-dir", str(folder)]
    with Server(model, flags, tmp_path_factory.mktemp("spilling") / "log") as running:
        yield running


def conversation(seed: int) -> str:
    rng = random.Random(seed)
    return f"{seed}: {' '.join(rng.choice(WORDS) for _ in range(70))}"


def ask(server: Server, text: str, rid: str | None = None) -> dict[str, Any]:
    body = {"text": text, "sampling_params": ANSWER}
    answer: dict[str, Any] = server.post("/generate", body | ({"rid": rid} if rid else {}))
    return answer


def test_a_conversation_that_returns_comes_from_the_disk(server: Server, spilling: Server, folder: Path) -> None:
    first = conversation(0)
    again = first + ask(spilling, first)["text"] + " and then?"
    for seed in (1, 2, 3):
        ask(spilling, conversation(seed))
    found = ask(spilling, again, rid="returned")
    assert found["text"] == ask(server, again)["text"]
    assert found["meta_info"]["cached_tokens"] > 300
    command = [sys.executable, "-m", "deploy.cli", "why", "returned"]
    story = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"more are loaded from the disk ({folder})" in story
    assert "tokens were loaded in" in story
    spilling.wait_for("its count", 60, lambda: spilling.total("tokenyard_worker_loaded_tokens_total") >= 256)
    assert spilling.total("tokenyard_worker_spilled_blocks_total") >= 20
    assert list(folder.iterdir()) == [], "the file has no name"


def test_a_worker_that_is_killed_while_it_saves_and_loads_loses_nothing(server: Server, spilling: Server) -> None:
    asked = [conversation(seed) for seed in range(10, 16)]
    wanted = {text: ask(server, text)["text"] for text in asked}
    wrong: list[str] = []
    done = threading.Semaphore(0)

    def repeat(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            text = rng.choice(asked)
            found = ask(spilling, text)["text"]
            if found != wanted[text]:
                wrong.append(found)
            done.release()

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        for _ in range(8):
            assert done.acquire(timeout=60)
        spilling.child("model_worker").send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


def test_nothing_can_be_read_after_the_end(spilling: Server, folder: Path) -> None:
    """The last test: it kills all processes, so that none could have removed anything."""
    ask(spilling, conversation(30))
    kill_together([psutil.Process(spilling.process.pid), *spilling.children()])
    assert list(folder.iterdir()) == []
