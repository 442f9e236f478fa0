"""A whole server on a GPU under load, its recovery from a killed worker, and transformers' own batching as a peer.

The model has random weights and the embedded model's tokenizer, which no figure depends on: prompts are token ids, and
answers are as long as asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch

from benchmarks import processes, server

Figures = dict[str, Any]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
START_S = 120.0
LOAD_S = 60.0
STREAMS = 16


def with_tokenizer(model: Path) -> Path:
    """Give a model's folder a tokenizer."""
    for name in TOKENIZER:
        shutil.copy(server.ROOT / "deploy" / "embedded_model" / "weights" / name, model / name)
    return model


def served(model: Path, devices: str, loads: Sequence[int], prompt: int, output: int, folder: Path) -> Figures:
    """Start a server, load it with so many requests at a time, then kill its worker under streams.

    The last is done again with a server whose weights a keeper has.
    """
    flags = [str(with_tokenizer(model)), "--devices", devices, "--max-running", str(max(loads)), "--log-level", "info"]
    found: Figures = {}
    with _server(flags, folder / "server.log") as (url, supervisor, seconds):
        found["seconds to ready"] = seconds
        for load in loads:
            found |= _load(url, load, prompt, output, folder)
        found |= _killed(url, supervisor, prompt, 3 * output)
    with _server([*flags, "--weight-keeper"], folder / "keeper.log") as (url, supervisor, _):
        kept = _killed(url, supervisor, prompt, 3 * output)
    lines = (folder / "keeper.log").read_text().splitlines()
    said = [line.partition(": ")[2] for line in lines if "weights were kept" in line or "weights are" in line]
    return {**found, **{f"{name}, weights kept": value for name, value in kept.items()}, "said of weights": said[:8]}


@contextlib.contextmanager
def _server(flags: Sequence[str], log: Path) -> Iterator[tuple[str, int, float]]:
    """Run a server. Yields its URL, its supervisor's pid, and the seconds until it was ready."""
    port = server.free_port()
    url = f"http://127.0.0.1:{port}"
    began = time.perf_counter()
    with server.running(server.serve_command(port, list(flags)), log) as process:
        asyncio.run(server.wait_until_ready(url, process, log, START_S))
        yield url, process.pid, round(time.perf_counter() - began, 1)


def _load(url: str, load: int, prompt: int, output: int, folder: Path) -> Figures:
    path = folder / f"load-{load}.json"
    command = [sys.executable, "-m", "deploy", "bench", url, "--concurrency", str(load), "--ignore-eos"]
    command += ["--prompt-tokens", str(prompt), "--output-tokens", str(output), "--save", str(path)]
    command += ["--requests", str(max(3, 3 * load)), "--time-limit", str(LOAD_S)]
    ran = subprocess.run(command, cwd=server.ROOT, capture_output=True, text=True, timeout=LOAD_S + 30, check=False)
    if not path.exists():
        return {f"{load} at a time": f"failed: {ran.stdout[-300:]} {ran.stderr[-300:]}"}
    result = json.loads(path.read_text())
    result = result[0] if isinstance(result, list) else result
    names = ("completed", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms")
    return {f"{load} at a time": ", ".join(f"{name} {result[name]:.5g}" for name in names if name in result)}


def _killed(url: str, supervisor: int, prompt: int, output: int) -> Figures:
    """Kill the worker under streams: the longest silence of any, and whether the texts are those without a kill."""
    whole = _streams(url, prompt, output, None)
    broken = _streams(url, prompt, output, supervisor)
    return {
        "streams": STREAMS,
        "longest silence ms, undisturbed": round(1000 * max(silence for _, silence in whole)),
        "longest silence ms, worker killed": round(1000 * max(silence for _, silence in broken)),
        "texts equal": sum(a == b for (a, _), (b, _) in zip(whole, broken, strict=True)),
    }


def _streams(url: str, prompt: int, output: int, supervisor: int | None) -> list[tuple[str, float]]:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(100, 900, prompt // 4).tolist() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(_stream, url, tokens, seed, output) for seed, tokens in enumerate(prompts)]
        if supervisor is not None:
            time.sleep(0.5)
            for process in processes.tree(supervisor)[1:]:
                if processes.role_of(process.cmdline()) == processes.WORKER:
                    process.send_signal(signal.SIGKILL)
                    break
        return [stream.result() for stream in streams]


def _stream(url: str, tokens: list[int], seed: int, output: int) -> tuple[str, float]:
    """Return a stream's text, and its longest time without a chunk."""
    body = {"prompt": tokens, "max_tokens": output, "stream": True, "ignore_eos": True, "seed": seed}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    text, silence, last = "", 0.0, None
    with urlopen(request, timeout=LOAD_S) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return f"error: {chunk['error']}", silence
            now = time.perf_counter()
            silence = max(silence, now - last) if last is not None else 0.0
            last = now
            text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    return text, silence


def transformers_batching(model: Path, device: torch.device, rows: int, prompt: int, output: int) -> Figures:
    """Output tokens a second of transformers' own continuous batching, greedy, with the attention that it has here."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    auto: Any = AutoModelForCausalLM
    peer = auto.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").to(device).eval()
    rng = np.random.default_rng(3)
    prompts = [rng.integers(100, 900, prompt).tolist() for _ in range(rows)]
    settings: Any = GenerationConfig
    config = settings(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    answers = peer.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    return {"rows": rows, "tokens": tokens, "tok/s": round(tokens / seconds, 1)}
