"""Ties the runner to an API process: its routes, and the room that its schedulers report."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from starlette.types import ASGIApp

from api_server.app import Application
from api_server.batches.calls import Answer, call, failed
from api_server.batches.runner import LOOK_SECONDS, Runner
from api_server.batches.store import Store
from api_server.state import ServerState
from shared.access_keys import AccessKeys, Caller

log = logging.getLogger("tokenyard")

# Most requests of batches at a time.
MOST_AT_ONCE = 128
# Seconds until batches are begun again after an error of ours.
AGAIN_SECONDS = 10.0


async def run_batches(application: Application) -> None:
    """Runs the batches of a server that has a folder for them, until this process leaves: then it begins no more."""
    store = application.server.store
    if store is None:
        return
    while not application.leaving:
        runner = runner_of(store, application.server, application.router)
        try:
            await _run(runner, application)
            return
        except Exception:
            log.exception("batches stand still by an error of ours; they are begun again in %g s", AGAIN_SECONDS)
            await asyncio.sleep(AGAIN_SECONDS)


async def _run(runner: Runner, application: Application) -> None:
    work = asyncio.create_task(runner.run())
    try:
        while not work.done():
            runner.leaving = application.leaving
            await asyncio.wait([work], timeout=LOOK_SECONDS)
        work.result()
    finally:
        work.cancel()
        # Requests that are under way end with it.
        await asyncio.gather(work, return_exceptions=True)


def runner_of(store: Store, server: ServerState, routes: ASGIApp) -> Runner:
    """Makes the runner of a server."""
    callers = _Callers(server)

    async def send(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        request_id = uuid.uuid4().hex
        caller = callers.named(tenant)
        if caller is None:
            message = f"the key {tenant!r} of this batch is no key of this server any more"
            return failed(request_id, 401, "authentication_error", message)
        return await call(routes, server, caller, request_id, path, body, seconds=seconds)

    return Runner(store, send, lambda own: room_of(server, own))


class _Callers:
    """The callers with the keys of the moment, by their names."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._keys: AccessKeys | None = None
        self._named: dict[str, Caller] = {}

    def named(self, name: str) -> Caller | None:
        """The caller with a name, with its weight and its limits; None where its key is gone."""
        keys = self._server.keys
        if keys is not self._keys:
            self._keys = keys
            self._named = {caller.name: caller for caller in keys.callers}
            if not keys.users:
                self._named[""] = Caller()
        return self._named.get(name)


def room_of(server: ServerState, own: int) -> int:
    """How many requests of batches may run now, `own` of them already do.

    Half of the places while no other request is there, and one while others are: it goes on when a worker is idle.
    """
    reports = [state.engine.status for state in server.models if state.engine.health().ready]
    known = [status for status in reports if status is not None]
    if not known:
        return 0
    others = sum(status.running + status.waiting for status in known) - own
    if others > 0:
        return 1
    return max(1, min(MOST_AT_ONCE, sum(status.max_running for status in known) // 2))
