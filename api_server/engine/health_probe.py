"""GET /health_generate: checks that a token comes out of the engine.

Recent tokens of other requests prove it as well, and so does a forward pass that is under way: a busy server gets no
extra request, and a long prefill is no failure.
"""

from __future__ import annotations

import asyncio
import uuid

from api_server.engine.client import EngineClient
from api_server.engine.submission import Submission
from interfaces import RequestID, SamplingParams, TextContext

PROBE_SECONDS = 20.0


async def problem(engine: EngineClient) -> str:
    """The reason why no token would come, or an empty string."""
    health = engine.health()
    if not health.ready:
        return health.reason
    if engine.moves:
        return ""
    submission = engine.submit(_context())
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await _first_update(submission)
    except TimeoutError:
        return "" if engine.moves else f"no token has come for {PROBE_SECONDS:.0f} s"
    finally:
        engine.cancel([submission])


def _context() -> TextContext:
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    return TextContext.from_prompt([0], params, request_id=RequestID(f"HEALTH_CHECK_{uuid.uuid4().hex}"))


async def _first_update(submission: Submission) -> str:
    while True:
        _, update = await submission.inbox.next()
        if update.error is not None:
            return update.error.message
        if update.is_done or (update.result is not None and update.result.tokens):
            return ""
