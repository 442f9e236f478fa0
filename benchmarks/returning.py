"""`python -m benchmarks.returning [MODEL]`: conversations that return after their blocks have left the KV cache.

More conversations than the cache holds take turns. Each turn sends all that was said, and a new question. The time to
the first token of returned conversations is measured on a server that computes them again, and on one with `--kv-spill`
in a folder (`--folder`, on the disk that is to be used). Nothing else may run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import server

START_SECONDS = 300.0
REQUEST_SECONDS = 600.0
QUESTION_TOKENS = 24
ANSWER_TOKENS = 8
# Token ids of words in most vocabularies; what begins and ends, and what stands for images, lies outside.
IDS = (300, 1000)


@dataclass(frozen=True)
class Figures:
    """Seconds to the first tokens of returned conversations, and how many of their tokens were loaded."""

    name: str
    seconds: list[float]
    loaded: float
    answers: list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        kept = ["--kv-spill", options.spill, "--kv-spill-dir", folder]
        found = [measured("computed again", [], options), measured("kv_spill", kept, options)]
    _show(found)
    if found[0].answers != found[1].answers:
        print(
            "the answers differ: --dtype float32 makes sums that do not depend on how prompts are cut", file=sys.stderr
        )
        return 1 if options.dtype == "float32" else 0
    return 0


def measured(name: str, flags: Sequence[str], options: argparse.Namespace) -> Figures:
    """Start a server with these flags, let all conversations take their turns, and end it."""
    port = server.free_port()
    shape = ["--kv-memory", options.kv_memory, "--max-running", "4", "--dtype", options.dtype]
    model = [options.model] if options.model else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with server.running(server.serve_command(port, [*model, *shape, *flags]), log) as process:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(server.wait_until_ready(url, process, log, START_SECONDS))
            return _converse(name, url, options)


def _converse(name: str, url: str, options: argparse.Namespace) -> Figures:
    random = np.random.default_rng(options.seed)
    said = [random.integers(*IDS, options.prompt_tokens).tolist() for _ in range(options.conversations)]
    seconds: list[float] = []
    answers: list[list[int]] = []
    for turn in range(options.turns + 1):
        for i in range(options.conversations):
            said[i] += random.integers(*IDS, QUESTION_TOKENS).tolist()
            first, answer = _ask(url, said[i])
            # Of both servers the prompts must be equal, so what was answered does not become part of them.
            answers.append(answer)
            if turn:
                seconds.append(first)
    return Figures(name, seconds, _loaded(url), answers)


def _ask(url: str, tokens: list[int]) -> tuple[float, list[int]]:
    """Returns the seconds to the first token, and the answer."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    begun, first, last = time.perf_counter(), 0.0, {}
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                last = json.loads(line[6:])
    return first, _answer(last)


def _answer(last: dict[str, Any]) -> list[int]:
    """The token ids of an answer, by its last event."""
    found: list[int] = last["output_ids"]
    return found


def _loaded(url: str) -> float:
    """Tokens that came back, once the scheduler's status has them; it is sent twice a second."""
    time.sleep(1.0)
    with urllib.request.urlopen(f"{url}/metrics", timeout=REQUEST_SECONDS) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tokenyard_worker_loaded_tokens_total"))


def _show(found: Sequence[Figures]) -> None:
    table = Table("", "returned", "first token p50, ms", "p90, ms", "mean, ms", "tokens loaded")
    for one in found:
        times = (*np.percentile(one.seconds, (50, 90)), statistics.mean(one.seconds))
        table.add_row(one.name, str(len(one.seconds)), *(f"{1e3 * t:.0f}" for t in times), f"{one.loaded:.0f}")
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.returning",
        description="The time to the first token of conversations that return, with and without kv_spill.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default="", help="folder of a model; none: the embedded one")
    add("--conversations", type=int, default=8, help="conversations that take turns")
    add("--turns", type=int, default=3, help="times that each returns")
    add("--prompt-tokens", type=int, default=1500, help="tokens with which a conversation begins")
    add("--kv-memory", default="64MB", help="KV cache, smaller than what the conversations need")
    add("--spill", default="4GB", help="bytes beside it")
    add("--folder", default=None, help="folder on the disk for them; none: the one for temporary files")
    add("--dtype", default="auto", help="as of `tokenyard serve`")
    add("--seed", type=int, default=0, help="seed of the prompts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
