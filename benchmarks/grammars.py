"""`python -m benchmarks.grammars`: what constrained answers cost.

    python -m benchmarks.grammars compile                # 50 schemas, cold and from the cache: milliseconds
    python -m benchmarks.grammars tokens -- MODEL        # TPOT of 16 constrained rows over that of 16 free ones

`tokens` starts a server with the flags after `--`, and alternates rounds of free and constrained requests, so that
a change of the machine's mood meets both. Compiling is measured through the API process's own compiler, helper process
and all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from api_server.constraints.compiler import ConstraintCompiler
from api_server.text.tokenizer import Tokenizer
from benchmarks import server
from deploy import embedded_model
from interfaces import Constraint, ConstraintKind
from shared.hidden_torch import hide_torch

SCHEMAS = 50
WORDS = [
    "name",
    "title",
    "street",
    "city",
    "country",
    "email",
    "phone",
    "amount",
    "price",
    "currency",
    "date",
    "start",
    "end",
    "status",
    "kind",
    "items",
    "tags",
]


def realistic_schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of the kinds that tools and extraction tasks have: some fields, enums, lists, nested and shared objects."""
    rng = random.Random(seed)
    return [_object(rng, levels=rng.randint(0, 3)) | {"title": f"schema {i}"} for i in range(count)]


def _object(rng: random.Random, levels: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(2, 9))
    properties = {name: _field(rng, levels) | {"description": f"The {name}."} for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _field(rng: random.Random, levels: int) -> dict[str, Any]:
    if levels and rng.random() < 0.4:
        inner = _object(rng, levels - 1)
        return inner if rng.random() < 0.5 else {"type": "array", "items": inner, "maxItems": rng.randint(3, 50)}
    plain: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "string", "maxLength": rng.randint(10, 200)},
        {"type": "string", "format": rng.choice(["date", "date-time", "email", "uuid"])},
        {"type": "string", "pattern": r"^[A-Z]{2}-\d{3,6}$"},
        {"type": "integer", "minimum": 0, "maximum": rng.randint(5, 5000)},
        {"type": ["number", "null"]},
        {"type": "boolean"},
        {"enum": rng.sample(WORDS, rng.randint(2, 10))},
        {"type": "array", "items": {"type": "string"}},
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 20}]},
    ]
    return rng.choice(plain)


async def compile_times(model: str) -> dict[str, list[float]]:
    """Seconds for each schema, when its content is new and when it is known."""
    tokenizer = Tokenizer.load(model)
    compiler = ConstraintCompiler(tokenizer.grammar_vocabulary)
    await compiler.compile(Constraint(ConstraintKind.REGEX, "a"))  # the helper's own start is not the question
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    for name in found:
        for schema in realistic_schemas(SCHEMAS):
            started = time.perf_counter()
            await compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
            found[name].append(time.perf_counter() - started)
    await compiler.close()
    tokenizer.close()
    return found


async def tpot_of_round(url: str, rows: int, tokens: int, constrained: bool, seed: int) -> list[float]:
    """Seconds per token after the first, of `rows` streams at once."""
    item = realistic_schemas(1, seed=7)[0]
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": 1.0, "stream": True, "ignore_eos": True}
    if constrained:
        # Never done within the answer's length, so that both kinds have as many tokens.
        body["guided_json"] = {"type": "array", "items": item, "minItems": 1000}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(i: int) -> float:
            prompt = random.Random(seed * 1000 + i).choices(range(100, 999), k=64)
            times: list[float] = []
            async with session.post(f"{url}/v1/completions", json=body | {"prompt": prompt, "seed": i}) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
            return (times[-1] - times[0]) / (tokens - 1)

        return list(await asyncio.gather(*(one(i) for i in range(rows))))


async def tpots(url: str, rows: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"free": [], "constrained": []}
    for seed in range(-1, rounds):
        for name, values in found.items():
            measured = await tpot_of_round(url, rows, tokens, name == "constrained", seed % 1000)
            values += measured if seed >= 0 else []  # the first round warms up
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammars", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compile", "tokens"))
    parser.add_argument("--model", default=str(Path(embedded_model.__file__).parent / "weights"), help="for compile")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments[:split])
    if options.what == "compile":
        hide_torch()
        found = asyncio.run(compile_times(options.model))
        _print(f"compiling {SCHEMAS} schemas, ms", found)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        log, port = Path(folder) / "log", server.free_port()
        url = f"http://127.0.0.1:{port}"
        server.compile_kernels()
        with server.running(server.serve_command(port, arguments[split + 1 :]), log) as process:
            asyncio.run(server.wait_until_ready(url, process, log, 300))
            found = asyncio.run(tpots(url, options.rows, options.output_tokens, options.rounds))
    _print(f"time per output token of {options.rows} rows, ms", found)
    print(f"constrained over free, medians: {np.median(found['constrained']) / np.median(found['free']):.3f}")
    return 0


def _print(title: str, found: dict[str, list[float]]) -> None:
    table = Table("", "n", "p50", "p90", "p99", "max", title=title)
    for row in _rows(found):
        table.add_row(*row)
    Console().print(table)


def _rows(found: dict[str, list[float]]) -> Iterator[list[str]]:
    for name, values in found.items():
        figures = np.percentile(np.array(values) * 1000, [50, 90, 99, 100])
        yield [name, str(len(values)), *(f"{figure:.2f}" for figure in figures)]


if __name__ == "__main__":
    sys.exit(main())
