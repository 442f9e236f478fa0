"""An adapter that came over HTTP leaves no file behind when its order fails, also after its client has left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api_server.generation import adapters
from interfaces import AdapterAnswer, LoRARequest, LoRAStatus


@pytest.mark.parametrize(("status", "left"), [(LoRAStatus.LOAD_NAME_EXISTS, 0), (LoRAStatus.SUCCESS, 1)])
async def test_a_client_that_leaves_leaves_only_what_is_used(tmp_path: Path, status: LoRAStatus, left: int) -> None:
    asked = asyncio.Event()
    answered = asyncio.Event()

    async def adapter(request: LoRARequest, pinned: bool) -> AdapterAnswer:
        asked.set()
        await answered.wait()
        return AdapterAnswer(1, 1, status, "")

    uploads = tmp_path / "uploads"
    engine = SimpleNamespace(questions=SimpleNamespace(adapter=adapter))
    server: Any = SimpleNamespace(models=[], uploaded_adapters=uploads, engine=engine)
    order = asyncio.create_task(adapters.load_files(server, "sent", {"r": 4}, b"12345678{}"))
    await asked.wait()
    order.cancel()
    with pytest.raises(asyncio.CancelledError):
        await order
    assert len(list(uploads.iterdir())) == 1
    (going_on,) = adapters._orders
    answered.set()
    await going_on
    assert len(list(uploads.iterdir())) == left
