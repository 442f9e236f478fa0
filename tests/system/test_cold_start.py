"""A server that finds no compiled kernels answers at once, and its worker is followed by one that has them.

On a machine that has none, it leaves its kernels to the tests that follow.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.system.server import Server

PROMPT = [5, 9, 20, 31, 7, 44, 12]


@pytest.mark.timeout(600)
def test_answers_come_before_the_kernels_and_stay_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Path(os.environ["NUMBA_CACHE_DIR"])
    if any(kernels.glob("compiled-float32-*")):
        kernels = tmp_path / "kernels"
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels))
    log = tmp_path / "log"
    body: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    texts: list[str] = []
    followed = threading.Event()
    with Server(model, ["--dtype", "float32", "--kv-memory", "2MB", "--served-model-name", "m"], log) as server:

        def ask() -> None:
            while not followed.wait(0.5):  # without pauses they would take the compiler its core
                texts.append(server.post("/v1/completions", body)["choices"][0]["text"])

        def sampled() -> Any:
            drawn = {**body, "temperature": 1.0, "seed": 3, "top_p": 0.9}
            return server.post("/v1/completions", drawn)["choices"][0]["text"]

        before = sampled()
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert "kernels are being compiled" in log.read_text()
            server.wait_for("compiled kernels", 480, lambda: "the kernels are compiled" in log.read_text())
            server.wait_for("a successor", 60, lambda: "worker 0 (cpu, epoch 1) is here" in log.read_text())
        finally:
            followed.set()
            asking.join()
        assert "died" not in log.read_text()
        texts.append(server.post("/v1/completions", body)["choices"][0]["text"])
        assert sampled() == before
        assert server.post("/v1/completions", {**body, "deterministic": True})["choices"][0]["text"] == texts[0]
    assert len(texts) > 10
    assert len(set(texts)) == 1
    (mark,) = kernels.glob("compiled-float32-*")
    late = [file.name for file in kernels.rglob("*.nb*") if file.stat().st_mtime > mark.stat().st_mtime]
    assert not late, "the worker compiled what it should have found"
