"""A thin /v1/completions over OpenVINO GenAI's continuous batching, run by the interpreter of its virtual environment.

Only what the load generator asks for: token-id prompts, greedy, streaming, usage. One thread runs the pipeline, the
event loop writes the streams; text is decoded token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web

KV_CACHE_GB = 2
BATCH_TOKENS = 512
YIELD_S = 0.0003
"""Between steps, so that the event loop gets the interpreter: a step holds it."""


@dataclass
class Stream:
    """One request. `updates` holds lists of new tokens, and None at the end; `abandoned`: its client has left."""

    prompt: list[int]
    config: openvino_genai.GenerationConfig
    updates: asyncio.Queue[list[int] | None]
    abandoned: bool = False


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, model: str, threads: int, sequences: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GB
        scheduler.max_num_seqs = sequences
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        # Without the hint it computes in float32, at less than half the speed.
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._arrived: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._numbers = itertools.count()

    def submit(self, stream: Stream) -> None:
        self._arrived.put(stream)

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        running: list[tuple[Any, Stream]] = []
        while True:
            while not running or not self._arrived.empty():
                running.append(self._begin(self._arrived.get()))
            for handle, stream in running:
                if stream.abandoned:
                    handle.cancel()
            self._pipeline.step()
            updates = [(stream, _new_tokens(handle), _ended(handle)) for handle, stream in running]
            running = [entry for entry, (_, _, ended) in zip(running, updates, strict=True) if not ended]
            loop.call_soon_threadsafe(_deliver, updates)
            time.sleep(YIELD_S)

    def _begin(self, stream: Stream) -> tuple[Any, Stream]:
        prompt = openvino.Tensor(np.array([stream.prompt], dtype=np.int64))
        return self._pipeline.add_request(next(self._numbers), prompt, stream.config), stream


def _new_tokens(handle: Any) -> list[int]:
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return tokens


def _ended(handle: Any) -> bool:
    return bool(handle.get_status() != openvino_genai.GenerationStatus.RUNNING)


def _deliver(updates: list[tuple[Stream, list[int], bool]]) -> None:
    for stream, tokens, ended in updates:
        if tokens:
            stream.updates.put_nowait(tokens)
        if ended:
            stream.updates.put_nowait(None)


def application(engine: Engine) -> web.Application:
    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = body["max_tokens"], False, True
        stream = Stream(body["prompt"], config, asyncio.Queue())
        engine.submit(stream)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        generated = 0
        try:
            while (tokens := await stream.updates.get()) is not None:
                generated += len(tokens)
                for token in tokens:
                    await response.write(_event(choices=[{"index": 0, "text": engine.tokenizer.decode([token])}]))
        finally:
            stream.abandoned = True
        prompt = len(stream.prompt)
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        await response.write(_event(choices=[], usage=usage) + b"data: [DONE]\n\n")
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "standard", "object": "model"}]})

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
    return app


def _event(**content: Any) -> bytes:
    return b"data: " + json.dumps({"object": "text_completion", **content}).encode() + b"\n\n"


async def serve(engine: Engine, port: int) -> None:
    threading.Thread(target=engine.serve, args=(asyncio.get_running_loop(),), daemon=True).start()
    runner = web.AppRunner(application(engine), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(serve(Engine(options.model, options.threads, options.sequences), options.port))


if __name__ == "__main__":
    main()
