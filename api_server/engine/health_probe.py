"""GET /health_generate: checks that the engine computes: that a token comes out of it, or the values of a text.

Recent results of other requests prove it as well, and so does a forward pass that is under way: a busy server gets no
extra request, and a long prefill is no failure.
"""

from __future__ import annotations

import asyncio
import uuid

import numpy as np

from api_server.engine.client import EngineClient
from api_server.engine.submission import Submission
from api_server.errors import RequestFailed
from interfaces import (
    GENERATE,
    PaintingContext,
    PoolingContext,
    PoolingTask,
    RequestID,
    SamplingParams,
    SynthesisContext,
    TextContext,
)

PROBE_SECONDS = 20.0
PROBE_SIDE = 64


async def problem(engine: EngineClient) -> str:
    """The reason why nothing would come, or an empty string."""
    health = engine.health()
    if not health.ready:
        return health.reason
    if engine.moves:
        return ""
    tasks = engine.model.tasks
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await (_token(engine) if not tasks or GENERATE in tasks else _values(engine, min(tasks)))
    except TimeoutError:
        return "" if engine.moves else f"no result has come for {PROBE_SECONDS:.0f} s"


async def _token(engine: EngineClient) -> str:
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    submission = engine.submit(TextContext.from_prompt([0], params, request_id=_name()))
    try:
        return await _first_update(submission)
    finally:
        engine.cancel([submission])


async def _first_update(submission: Submission) -> str:
    while True:
        _, update = await submission.inbox.next()
        if update.error is not None:
            return update.error.message
        if update.is_done or (update.result is not None and update.result.tokens):
            return ""


async def _values(engine: EngineClient, task: str) -> str:
    try:
        if task == PoolingTask.SPEAK:
            seeds = np.zeros(1, np.int64)
            await engine.pool(SynthesisContext.of([[0]], PoolingTask.SPEAK, seeds=seeds, request_id=_name()))
        elif task == PoolingTask.PAINT:
            # A side that all models take.
            sizes = {"height": PROBE_SIDE, "width": PROBE_SIDE, "steps": 1}
            seeds = np.zeros(1, np.int64)
            context = PaintingContext.of([[0]], PoolingTask.PAINT, seeds=seeds, prompt="", request_id=_name(), **sizes)
            await engine.pool(context)
        else:
            await engine.pool(PoolingContext.of([[0]], PoolingTask(task), request_id=_name()))
    except RequestFailed as error:
        return error.message
    return ""


def _name() -> RequestID:
    return RequestID(f"HEALTH_CHECK_{uuid.uuid4().hex}")
