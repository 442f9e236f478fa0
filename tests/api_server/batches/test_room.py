"""How many requests of batches may run beside others, and for which caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from api_server.batch_service import MOST_AT_ONCE, room_of, runner_of
from api_server.batches.store import Store
from api_server.state import ServerState
from shared.access_keys import AccessKeys, Caller


@dataclass
class Report:
    running: int
    waiting: int
    max_running: int


@dataclass
class Engine:
    status: Report | None
    ready: bool = True

    def health(self) -> Any:
        return self


@dataclass
class Model:
    engine: Engine


@dataclass
class Server:
    models: list[Model] = field(default_factory=list)


@pytest.mark.parametrize(
    ("reports", "own", "room"),
    [
        ([Report(0, 0, 16)], 0, 8),
        ([Report(8, 0, 16)], 8, 8),
        ([Report(1, 0, 16)], 0, 1),
        ([Report(9, 0, 16)], 8, 1),
        ([Report(0, 1, 16)], 0, 1),
        ([Report(0, 0, 1)], 0, 1),
        ([Report(0, 0, 4096)], 0, MOST_AT_ONCE),
        ([Report(0, 0, 16), Report(0, 0, 8)], 0, 12),
        ([Report(0, 0, 16), Report(3, 0, 8)], 0, 1),
        ([None], 0, 0),
    ],
)
def test_half_of_the_places_while_no_other_is_there(reports: list[Report | None], own: int, room: int) -> None:
    server = Server([Model(Engine(report)) for report in reports])
    assert room_of(cast(ServerState, server), own) == room


def test_nothing_while_the_server_is_not_ready() -> None:
    server = Server([Model(Engine(Report(0, 0, 16), ready=False))])
    assert room_of(cast(ServerState, server), 0) == 0


async def test_requests_come_from_the_key_of_the_moment(tmp_path: Path) -> None:
    seen: list[Caller] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"]["caller"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    class Keyed:
        keys = AccessKeys()

    keyed = Keyed()
    send = runner_of(Store(tmp_path, 1), cast(ServerState, keyed), app)._send
    assert (await send("", "/v1/embeddings", {}, 5)).status == 200
    keyed.keys = AccessKeys((f"sha256:{'a' * 64}*7;name=team;rpm=3",))
    assert (await send("team", "/v1/embeddings", {}, 5)).status == 200
    assert seen == [Caller(), Caller("team", weight=7, requests_per_minute=3)]
    for gone in ("", "other"):
        answer = await send(gone, "/v1/embeddings", {}, 5)
        assert answer.status == 401
        assert "is no key of this server any more" in answer.body["error"]["message"]
    assert len(seen) == 2
