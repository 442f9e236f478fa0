"""The short form of the fuzz: hostile frames on both sockets while streams run, and nobody notices."""

from __future__ import annotations

import random
import threading

from tests.chaos.fuzz import noise, throw
from tests.chaos.streams import Heard, Request
from tests.chaos.waves import compare, run, run_directory
from tests.system.server import Server

FRAMES = 2000


def test_hostile_frames_end_no_process_and_no_request(
    server: Server, asked: list[Request], undisturbed: list[Heard]
) -> None:
    seed = random.getrandbits(32)
    directory, before = run_directory(server), server.processes()

    def attack(_: Server) -> None:
        throwers = [
            threading.Thread(target=throw, args=(f"ipc://{directory}/{name}.sock", FRAMES, seed + i))
            for i, name in enumerate(("api", "workers"))
        ]
        for thrower in throwers:
            thrower.start()
        for name in ("api", "workers"):
            noise(directory / f"{name}.sock", 50, seed)
        for thrower in throwers:
            thrower.join()

    outcome = compare(asked, undisturbed, run(server, asked, attack, after=0.1))
    assert outcome.clean, f"seed {seed}: {outcome}\n{server.log.read_text()[-3000:]}"
    assert server.processes() == before, f"seed {seed}\n{server.log.read_text()[-3000:]}"
