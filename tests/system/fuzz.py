"""What the tests that send strange requests share: how many, and what must hold of the server afterwards."""

from __future__ import annotations

import os
import urllib.error
from dataclasses import dataclass, field
from typing import Any

from tests.system.server import Server

# Requests for each route in the long form (`make fuzz`); 0: the short one.
LONG = int(os.environ.get("TOKENYARD_TEST_FUZZ", "0"))
# Routes after which no request is served until `go_on`.
PAUSES = ("/pause_generation", "/pause", "/sleep", "/release_memory_occupation")
# Routes that wait for another process; test_weights.py asks them.
MEETINGS = ("/init_weights_update_group", "/init_weight_transfer_engine")
# Maximum bytes that a process may grow by: caches fill. The long form has the same limit.
_GROWTH = 150 << 20


def go_on(server: Server) -> None:
    """Takes a pause of any kind back."""
    for path in ("/wake_up", "/continue_generation"):
        try:
            server.post(path, {})
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from error


@dataclass
class Unharmed:
    """`with Unharmed(server):` the same processes still serve, give the same answer, and hold nothing."""

    server: Server
    _before: tuple[Any, ...] = field(default=())

    def __enter__(self) -> None:
        self._before = (self.server.processes(), self._answer())
        self._memory = self._resident()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self.server.wait_for("all blocks being free", 20, lambda: self._used() == 0)
        assert (self.server.processes(), self._answer()) == self._before
        growth = {pid: bytes_now - self._memory[pid] for pid, bytes_now in self._resident().items()}
        assert max(growth.values()) < _GROWTH, growth

    def _answer(self) -> list[int]:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
        ids: list[int] = self.server.post("/generate", body)["output_ids"]
        return ids

    def _used(self) -> float:
        return sum(v for k, v in self.server.metrics("tokenyard_kv_blocks").items() if 'state="used"' in k)

    def _resident(self) -> dict[int, int]:
        """Of the processes that serve: one that compiles kernels beside them grows."""
        serving = [child for child in self.server.children() if "compile_kernels" not in " ".join(child.cmdline())]
        return {child.pid: int(child.memory_info().rss) for child in serving}
