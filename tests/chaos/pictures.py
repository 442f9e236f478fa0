"""The long form about images: requests with large pictures while workers, scheduler and media processes are killed."""

from __future__ import annotations

import argparse
import io
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

from tests.chaos.waves import shared_memory
from tests.system.server import Server
from tests.system.test_images import FLAGS, made, uri

REQUESTS = 100
KILLS = 10
AT_ONCE = 6
# Noise of this many pixels a side is a PNG of 4 MB.
SIDE = 1180
TOKENS = 40
VICTIMS = ("model_worker", "scheduler", "api_server.media")
PAUSE_S = (5.0, 7.0)
# Nothing may be left after this time at rest.
REST_S = 5.0


def pictures(options: argparse.Namespace) -> dict[str, object]:
    """A hundred pictures of 4 MB and ten kills; answers against those of the same server without kills."""
    memory = shared_memory()
    tiny = made("llava", options.folder / "tiny-llava")
    killed: Counter[str] = Counter()
    over = threading.Event()
    files = [_noise(options.seed % 1000 + i) for i in range(REQUESTS)]
    with Server(tiny.path, FLAGS, options.folder / "pictures.log") as server:

        def ask(data: bytes) -> str:
            return _answer(server, tiny.prompt(), data)

        def reap() -> None:
            while sum(killed.values()) < KILLS and not over.wait(options.random.uniform(*PAUSE_S)):
                # In turn: the supervisor gives up after five deaths of one process that come too soon.
                name = VICTIMS[sum(killed.values()) % len(VICTIMS)]
                if _kill(server, name):
                    killed[name] += 1

        ask(files[0])
        thread = threading.Thread(target=reap)
        thread.start()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            disturbed = list(pool.map(ask, files))
            # The last requests may have ended before the last kill.
            repeated = []
            while thread.is_alive():
                repeated.append(ask(files[0]))
        over.set()
        thread.join()
        undisturbed = [ask(data) for data in files]
        time.sleep(REST_S)
    left = sorted(shared_memory() - memory)
    answers = [*disturbed, *repeated]
    expected = [*undisturbed, *undisturbed[:1] * len(repeated)]
    lost = sum(answer.startswith("HTTP ") for answer in (*answers, *undisturbed))
    changed = sum(a != b for a, b in zip(answers, expected, strict=True))
    return {
        "passed": not left and not changed and not lost and sum(killed.values()) == KILLS,
        "requests": len(answers),
        "bytes of a picture": len(files[0]),
        "kills": dict(killed),
        "answers lost": lost,
        "answers changed": changed,
        "shared memory left": left,
    }


def _noise(seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def _answer(server: Server, prompt: str, data: bytes) -> str:
    """The tokens of an answer, or the status of a refusal, after the retries that a refusal asks for."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body: dict[str, Any] = {"text": prompt, "image_data": uri(data), "sampling_params": sampling}
    status = 0
    for _ in range(20):
        response = httpx.post(f"{server.url}/generate", json=body, timeout=300)
        if response.status_code == 200:
            return str(response.json()["output_ids"])
        status = response.status_code
        if status != 503:
            break
        time.sleep(0.5)
    return f"HTTP {status}"


def _kill(server: Server, name: str) -> bool:
    """Whether a process of this name was there to be killed."""
    try:
        if name == "api_server.media":
            found = [
                child for child in server.child("api_server").children() if "media_process" in " ".join(child.cmdline())
            ]
            found[0].send_signal(signal.SIGKILL)
        else:
            server.child(name).send_signal(signal.SIGKILL)
    except (IndexError, psutil.Error):
        return False
    return True
