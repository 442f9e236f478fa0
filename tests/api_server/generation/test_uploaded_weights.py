"""Files of tensors that come over HTTP are written all together, or none of them stays."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api_server.errors import ErrorKind, RequestFailed
from api_server.generation import weights
from interfaces import RunningMode

HEADER = json.dumps({"t": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
FILE = base64.b64encode(len(HEADER).to_bytes(8, "little") + HEADER).decode()


def sent(folder: Path, texts: list[str]) -> Any:
    """An update from files. Nothing of the server is needed before the order."""
    server: Any = SimpleNamespace(uploaded_weights=folder)
    return weights.from_files(server, texts, "new", RunningMode.KEEP, False)


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "uploads"
    opened = os.fdopen
    kept: list[int] = []

    def fdopen(descriptor: int, mode: str) -> Any:
        kept.append(len(list(folder.iterdir())))
        if len(kept) == 1:
            return opened(descriptor, mode)
        os.close(descriptor)
        return open("/dev/full", mode)

    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.raises(RequestFailed, match=r"the tensors cannot be written to .*: No space left") as error:
        asyncio.run(sent(folder, [FILE, FILE]))
    assert error.value.kind is ErrorKind.UNAVAILABLE
    assert kept == [1, 2]
    assert list(folder.iterdir()) == []


def test_a_request_that_ends_while_a_file_is_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "uploads"
    opened = os.fdopen
    begun = threading.Event()
    go_on = threading.Event()
    seen: list[int] = []

    def fdopen(descriptor: int, mode: str) -> Any:
        if seen or begun.is_set():
            return opened(descriptor, mode)
        begun.set()
        assert go_on.wait(60)
        seen.append(len(list(folder.iterdir())))
        return opened(descriptor, mode)

    monkeypatch.setattr(os, "fdopen", fdopen)

    async def left() -> None:
        task = asyncio.ensure_future(sent(folder, [FILE, FILE]))
        try:
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            go_on.set()

    # Returns once the thread has ended, too.
    asyncio.run(left())
    assert len(seen) == 1
    assert list(folder.iterdir()) == []
