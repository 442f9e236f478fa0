"""A keeper in a thread of the test, with memory of the host."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from model_worker.keeper.kept_weights import KeptWeights
from model_worker.keeper.pieces import Pieces
from model_worker.keeper.protocol import conversation
from model_worker.keeper.server import Keeper
from tests.model_worker.keeper.host_pieces import HostPieces


@dataclass
class Running:
    """A keeper that talks at `path`."""

    path: Path
    memory: HostPieces
    able: bool = True

    def worker(self) -> KeptWeights:
        """What a worker that starts knows of it."""
        return KeptWeights(self.path, HostPieces)

    def pieces(self) -> Pieces:
        if not self.able:
            raise OSError("there is no GPU")
        return self.memory


@contextlib.contextmanager
def running() -> Iterator[Running]:
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        keeper = Running(Path(folder) / "keep0.sock", HostPieces())
        one.bind(str(keeper.path))
        one.listen()

        ended = Event()

        class Ending(Keeper):
            def converse(self, connection: socket.socket) -> None:
                if ended.is_set():
                    raise OSError
                super().converse(connection)

        def serve() -> None:
            with contextlib.suppress(OSError):
                Ending(keeper.pieces).serve(one)

        thread = Thread(target=serve)
        thread.start()
        yield keeper
        ended.set()
        with conversation(keeper.path):
            thread.join()
