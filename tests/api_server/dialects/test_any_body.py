"""Random bodies to every route of every sort of server: each gets an answer or its dialect's error, and none a bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_server.dialects.sglang import weights as sglang_weights
from api_server.dialects.vllm import weights as vllm_weights
from api_server.text.tokenizer import Tokenizer
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, encode, serving
from tests.api_server.media import models
from tests.api_server.media.test_dialects import double_of
from tests.api_server.pooling.conftest import LABELS, PoolingDouble, checkpoint
from tests.api_server.scheduler_double import SchedulerDouble
from tests.strange_bodies import send_to_every_route
from tests.system.fuzz import LONG

# For each route.
BODIES = LONG or 6
# The double answers no orders about weights; test_malformed.py asks a real scheduler.
ABOUT_WEIGHTS = {str(route.path) for dialect in (sglang_weights, vllm_weights) for route in dialect.routes()}


@contextmanager
def texts(folder: Path, model_directory: Path) -> Iterator[LiveServer]:
    """A server of a model that writes, and takes adapters."""
    run_directory = RunDirectory(folder)
    tokenizer = Tokenizer.load(str(model_directory))
    answer = [*encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]]
    double = SchedulerDouble(run_directory.api_endpoint, lambda _: answer, vocab_size=tokenizer.vocab_size)
    settings = Settings(model=str(model_directory), lora_dirs=str(folder), hidden_states=True)
    with serving(double, run_directory, tokenizer, settings) as live:
        live.state.uploaded_adapters = run_directory.uploaded_adapters
        yield live
    double.close()


@contextmanager
def images(folder: Path, _: Path) -> Iterator[LiveServer]:
    """A server of a model with eyes."""
    run_directory = RunDirectory(folder)
    model = models.write(folder / "model", "qwen2_vl")
    tokenizer = Tokenizer.load(str(model))
    double = double_of(run_directory, tokenizer)
    with serving(double, run_directory, tokenizer, Settings(model=str(model))) as live:
        yield live
    double.close()


Start = Callable[[Path, Path], AbstractContextManager[LiveServer]]


def pooling(architecture: str, tasks: list[str], labels: list[str]) -> Start:
    @contextmanager
    def started(folder: Path, _: Path) -> Iterator[LiveServer]:
        run_directory = RunDirectory(folder)
        config: dict[str, Any] = {"id2label": dict(enumerate(labels))} if labels else {}
        model = checkpoint(folder / "model", architecture, **config)
        tokenizer = Tokenizer.load(str(model))
        double = PoolingDouble(
            run_directory.api_endpoint,
            lambda _: [],
            max_model_len=512,
            vocab_size=tokenizer.vocab_size,
            tasks=tasks,
            labels=labels,
        )
        with serving(double, run_directory, tokenizer, Settings(model=str(model))) as live:
            yield live
        double.close()

    return started


KINDS: dict[str, Start] = {
    "texts": texts,
    "images": images,
    "embeddings": pooling("BertModel", ["embed", "embed_tokens"], []),
    "sparse": pooling("BertForMaskedLM", ["sparse"], []),
    "scores": pooling("BertForSequenceClassification", ["classify"], ["LABEL_0"]),
    "classes": pooling("BertForSequenceClassification", ["classify"], LABELS),
    "token classes": pooling("BertForTokenClassification", ["classify_tokens"], LABELS),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_body_gets_an_answer(kind: str, tmp_path: Path, model_directory: Path) -> None:
    with KINDS[kind](tmp_path, model_directory) as live, httpx.Client(base_url=live.url) as client:
        live.double.step_seconds = 0.0
        document = client.get("/openapi.json").json()
        assert send_to_every_route(client, document, BODIES, ABOUT_WEIGHTS)[200] > 0
        live.double.wait(lambda: live.state.engine.running == 0)
