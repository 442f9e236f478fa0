"""A process that runs batches until it is killed: `python -m tests.api_server.batches.victim FOLDER ANSWERS`.

Its requests are answered after a random moment; every seventh has an error. It kills itself a random moment after so
many answers, which may be within any step of the runner; 0: never.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from api_server.batches import runner
from api_server.batches.calls import Answer
from api_server.batches.store import Store

MOST = 1 << 30


async def answer(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
    """Answers a body `{"input": N}`."""
    await asyncio.sleep(random.uniform(0, 0.004))
    number = body["input"]
    return Answer(f"r{number}", 400 if number % 7 == 0 else 200, {}, {"tenant": tenant, "number": number})


async def run(folder: Path, answers: int) -> None:
    """Runs batches quickly."""
    runner.LOOK_SECONDS = 0.01
    left = answers

    async def counted(tenant: str, path: str, body: dict[str, Any], seconds: int) -> Answer:
        nonlocal left
        left -= 1
        if left == 0:
            threading.Timer(random.uniform(0, 0.008), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return await answer(tenant, path, body, seconds)

    await runner.Runner(Store(folder, MOST), counted, lambda _: 8).run()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
