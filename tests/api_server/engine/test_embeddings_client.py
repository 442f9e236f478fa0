"""Leaving while other threads wait."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path
from threading import Thread

from api_server.engine.embeddings import SocketEmbeddings


def test_calls_of_other_threads_end_when_it_is_closed(tmp_path: Path) -> None:
    embeddings = SocketEmbeddings(tmp_path)
    ended = []

    def wait() -> None:
        try:
            embeddings.wait_until_ready(30.0)
        except CancelledError as error:
            ended.append(error)

    thread = Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    embeddings.close()
    thread.join(5.0)
    assert len(ended) == 1
    embeddings.close()
