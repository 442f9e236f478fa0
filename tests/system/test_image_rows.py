"""Images from a client to a worker over the real sockets, with the real scheduler and worker processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from api_server.engine.client import EngineClient
from api_server.engine.submission import Submission
from interfaces import GenerationStatus, SamplingParams, TextAndVisionContext
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.model_worker.vision.test_families import generated
from tests.model_worker.vision.tiny_composites import gemma3, llava, qwen2_vl, qwen3_vl
from tests.model_worker.vision.tiny_parts import IDS, IMAGE, TEXT, TOWER, Tiny, made

TOKENS = 6


class Yard:
    """A scheduler, and one worker that is started again after its death."""

    def __init__(self, folder: Path, tiny: Tiny, **settings: Any) -> None:
        model = folder / "model"
        tiny.model.save_pretrained(model)
        self.run_directory = RunDirectory(folder)
        self.settings = Settings(
            model=str(model), dtype="float32", kv_memory="16MiB", max_running=8, task="generate", **settings
        )
        self.run_directory.settings_file.write_text(self.settings.to_json())
        self._scheduler = self._begin(["-m", "scheduler"])
        self.epoch = -1
        self.start_worker()
        self.client = EngineClient(self.run_directory.api_endpoint, "test")
        self.client.start()

    def start_worker(self) -> None:
        self.epoch += 1
        self.worker = self._begin(["-m", "model_worker"], "--epoch", str(self.epoch))

    def close(self) -> None:
        self.client.close()
        for process in (self.worker, self._scheduler):
            process.terminate()
            process.wait(60)

    async def ready(self) -> None:
        deadline = time.monotonic() + 300
        while not self.client.health().ready:
            assert self.worker.poll() is None, "the worker has ended"
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    def _begin(self, command: list[str], *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *command, "--run-dir", str(self.run_directory.path), *arguments])


@contextmanager
def yard_of(folder: Path, tiny: Tiny, **settings: Any) -> Iterator[Yard]:
    yard = Yard(folder, tiny, **settings)
    try:
        yield yard
    finally:
        yard.close()


def context_of(
    tiny: Tiny, texts: list[list[int]], images: list[dict[str, Tensor]], hashes: list[int | None] | None = None
) -> TextAndVisionContext:
    tokens, starts = tiny.prompt(texts)
    named = hashes or [None] * len(images)
    return TextAndVisionContext.from_prompt(
        tokens,
        SamplingParams(max_new_tokens=TOKENS, temperature=0.0),
        ignore_eos=True,
        vision_token_ids=[IMAGE],
        images=[tiny.image(*parts) for parts in zip(images, starts, named, strict=True)],
    )


async def tokens_of(submission: Submission) -> list[int]:
    async with asyncio.timeout(120):
        while not submission.context.is_done:
            await submission.inbox.next()
    context = submission.context
    assert context.status != GenerationStatus.CANCELLED
    return [int(token) for token in context.tokens.all[context.prompt_length :]]


@pytest.mark.parametrize("make", [llava, qwen2_vl, qwen3_vl, gemma3], ids=lambda make: make.__name__)
async def test_answers_are_those_of_transformers(make: Callable[[], Tiny], tmp_path: Path) -> None:
    tiny = made(make)
    images = [tiny.draw() for _ in range(3)]
    text = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    cases: list[tuple[list[list[int]], list[int]]] = [
        ([text, [7, 8, 9]], [0]),
        ([text, [7, 8], [9, 10]], [1, 2]),
        # A prompt that begins like the first one, up to the middle of the image.
        ([text, [30, 31, 32]], [0]),
        ([[3], [11, 12]], [2]),
        ([[40], [41]], [0]),
    ]
    expected = [generated(tiny, texts, [images[i] for i in which])[0] for texts, which in cases]

    def contexts() -> list[TextAndVisionContext]:
        return [
            context_of(tiny, texts, [images[i] for i in which], [1000 + i for i in which]) for texts, which in cases
        ]

    with yard_of(tmp_path, tiny, max_batch_tokens=32) as yard:
        await yard.ready()
        first = await tokens_of(yard.client.submit(contexts()[0]))
        assert first == expected[0]
        for _ in range(2):
            together = [yard.client.submit(context) for context in contexts()]
            assert [await tokens_of(submission) for submission in together] == expected
        last = yard.client.submit(contexts()[0])
        assert await tokens_of(last) == expected[0]
        assert (last.context.cached_prefix_length or 0) > len(text), "blocks with the image were found"


async def test_an_image_that_cannot_be_encoded_fails_its_request_alone(tmp_path: Path) -> None:
    tiny = made(llava)
    images = [tiny.draw() for _ in range(2)]
    texts = [[3, 4], [7, 8]]
    want = generated(tiny, texts, images[:1])[0]
    with yard_of(tmp_path, tiny) as yard:
        await yard.ready()
        broken = yard.client.submit(context_of(tiny, texts, [{"pixel_values": torch.zeros(1, 3, 16, 12)}]))
        good = yard.client.submit(context_of(tiny, texts, images[:1]))
        assert await tokens_of(good) == want
        async with asyncio.timeout(20):
            while not broken.context.is_done:
                await broken.inbox.next()
        error = broken.take().error
        assert error is not None
        assert "an image" in error.message


def heavy_llava() -> Tiny:
    """A tower that takes about a second for the images of a prompt."""
    config = transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "llama", "max_position_embeddings": 4096},
        vision_config=TOWER
        | {
            "model_type": "clip_vision_model",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "image_size": 128,
            "patch_size": 8,
            "projection_dim": 32,
        },
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        **IDS,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    return Tiny(model, lambda: {"pixel_values": torch.randn(1, 3, 128, 128)}, 256)


async def begun(yard: Yard, emitted: int, context_of: Callable[[], TextAndVisionContext]) -> Submission:
    """A request that has that many tokens. With none its images are being encoded, which a fast machine soon ends."""
    for seconds in (0.3, 0.1, 0.03, 0.01):
        submission = yard.client.submit(context_of())
        context = submission.context
        async with asyncio.timeout(60):
            while len(context.tokens) - context.prompt_length < emitted:
                await submission.inbox.next()
        if emitted:
            return submission
        await asyncio.sleep(seconds)
        if len(context.tokens) == context.prompt_length:
            return submission
        await tokens_of(submission)
    raise AssertionError("images were never seen to be encoded")


async def test_a_worker_may_die_while_it_encodes_and_in_decode(tmp_path: Path) -> None:
    tiny = made(heavy_llava)
    images = [tiny.draw() for _ in range(6)]
    texts = [[3, 4], *[[7, 8]] * 6]
    undisturbed = generated(tiny, texts, images)[0]
    with yard_of(tmp_path, tiny) as yard:
        await yard.ready()
        assert await tokens_of(yard.client.submit(context_of(tiny, texts, images))) == undisturbed
        for emitted in (0, 2):
            submission = await begun(yard, emitted, lambda: context_of(tiny, texts, images))
            yard.worker.kill()
            yard.worker.wait()
            yard.start_worker()
            assert await tokens_of(submission) == undisturbed
