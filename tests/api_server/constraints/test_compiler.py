"""The compiler's real helper process: answers, bounds, caching, and its own death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api_server.constraints.compiler import ConstraintCompiler
from api_server.errors import ErrorKind, RequestFailed
from deploy import embedded_model
from interfaces import Constraint, ConstraintKind
from tests.kills import kill_unseen

TOKENIZER = Path(embedded_model.__file__).parent / "weights" / "tokenizer.json"
GOOD = Constraint(ConstraintKind.REGEX, "a+", field="regex")
MEMBERS = {"properties": {f"p{i}": {"type": "string"} for i in range(9000)}, "additionalProperties": False}
# Within all limits, and yet too much: only the clock ends it.
ENDLESS = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(MEMBERS), field="schema")


@pytest.fixture
async def compiler() -> AsyncIterator[ConstraintCompiler]:
    made = ConstraintCompiler(lambda: (TOKENIZER.read_text(), [0]))
    yield made
    await made.close()


async def test_a_constraint_is_compiled_once(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = compiler._send

    async def counted(key: bytes, constraint: Constraint) -> None:
        sent.append(key)
        await send(key, constraint)

    monkeypatch.setattr(compiler, "_send", counted)
    grammars = await asyncio.gather(*(compiler.compile(GOOD) for _ in range(5)))
    assert set(grammars) == {await compiler.compile(GOOD)}
    assert len(sent) == 1


async def test_a_refusal_names_the_field(compiler: ConstraintCompiler) -> None:
    for _ in range(2):
        with pytest.raises(RequestFailed, match="schema cannot be enforced: the schema has not") as refused:
            await compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, '{"not": {"type": "null"}}', field="schema"))
        assert (refused.value.kind, refused.value.field) == (ErrorKind.INVALID, "schema")


@pytest.mark.slow
async def test_what_costs_without_end_is_ended_and_delays_nobody(compiler: ConstraintCompiler) -> None:
    await compiler.compile(GOOD)
    endless = asyncio.create_task(compiler.compile(ENDLESS))
    await asyncio.sleep(0.05)
    for i in range(3):
        await compiler.compile(Constraint(ConstraintKind.REGEX, f"b{{{i + 1}}}"))
    assert not endless.done()
    with pytest.raises(RequestFailed, match="schema cannot be enforced: it takes more than 1 s of processor time"):
        await endless


async def test_ten_megabytes_are_refused_at_once(compiler: ConstraintCompiler) -> None:
    started = time.process_time()
    with pytest.raises(RequestFailed, match="it has 10000000 characters; at most"):
        await compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, "x" * 10_000_000))
    assert time.process_time() - started < 0.2


async def test_a_client_that_leaves_takes_nothing_from_others(compiler: ConstraintCompiler) -> None:
    first = asyncio.create_task(compiler.compile(GOOD))
    await asyncio.sleep(0)
    second = asyncio.create_task(compiler.compile(GOOD))
    await asyncio.sleep(0)
    first.cancel()
    assert await second


@pytest.mark.slow
async def test_a_helper_that_dies_costs_no_request(compiler: ConstraintCompiler) -> None:
    await compiler.compile(GOOD)
    for i in range(3):
        assert compiler._process is not None
        kill_unseen(compiler._process.pid)
        assert await compiler.compile(Constraint(ConstraintKind.CHOICE, f'["x{i}"]'))


@pytest.mark.slow
async def test_a_constraint_of_which_two_helpers_die_is_refused(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compiler.compile(GOOD)
    send = compiler._send

    async def deadly(key: bytes, constraint: Constraint) -> None:
        await send(key, constraint)
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGKILL)

    monkeypatch.setattr(compiler, "_send", deadly)
    with pytest.raises(RequestFailed, match="has died; retry") as failed:
        await compiler.compile(ENDLESS)
    assert failed.value.kind is ErrorKind.UNAVAILABLE
    monkeypatch.setattr(compiler, "_send", send)
    assert await compiler.compile(Constraint(ConstraintKind.CHOICE, '["x"]'))
