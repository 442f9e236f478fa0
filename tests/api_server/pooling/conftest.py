"""Checkpoints that pool, without weights; a scheduler double that plays their model; and the real server before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from api_server.text.tokenizer import Tokenizer
from interfaces import PooledValues, PoolingContext, PoolingTask, Status, Submit, Vectors
from shared.endpoints import RunDirectory
from shared.settings import Settings
from shared.sockets import send_to
from tests.api_server.conftest import CORPUS, LiveServer, serving
from tests.api_server.scheduler_double import SchedulerDouble

WIDTH = 8
LIMIT = 64
LABELS = ["good", "bad", "neither"]
PROMPTS = {"query": "query: ", "document": "passage: "}


def wordpiece_backend(size: int = 600) -> Backend:
    """Like BERT's; its ids are below `size`."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=size, special_tokens=special))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


def save_tokenizer(folder: Path, limit: int = LIMIT, size: int = 600) -> None:
    from transformers import BertTokenizer, PreTrainedTokenizerFast

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=wordpiece_backend(size),
        mask_token="[MASK]",
        model_max_length=limit,
        model_input_names=BertTokenizer.model_input_names,
        **names,
    ).save_pretrained(folder)


def checkpoint(folder: Path, architecture: str, limit: int = LIMIT, **config: Any) -> Path:
    """The files of a BERT, without weights."""
    folder.mkdir()
    save_tokenizer(folder, limit)
    facts = {"architectures": [architecture], "model_type": "bert", "max_position_embeddings": 512, **config}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoint(tmp_path_factory.mktemp("models") / "tiny-embedder", "BertModel")
    prompts = {"model_type": "SentenceTransformer", "prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-reranker"
    return checkpoint(folder, "BertForSequenceClassification", id2label={"0": "LABEL_0"}, num_labels=1)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-classifier"
    return checkpoint(folder, "BertForSequenceClassification", id2label=dict(enumerate(LABELS)))


def vector_of(tokens: NDArray[np.int32], width: int = WIDTH) -> NDArray[np.float32]:
    """What the double's model makes of a text: it depends on every token and on their order."""
    places = np.arange(1, len(tokens) + 1)
    return np.array([np.sin(tokens * (k + 1.0) + places).sum() for k in range(width)], np.float32)


@dataclass
class PoolingDouble(SchedulerDouble):
    """A scheduler whose model pools. It answers in parts, the last one first, that come as one message."""

    tasks: list[str] = field(default_factory=lambda: ["embed", "embed_tokens"])
    labels: list[str] = field(default_factory=list)

    def _status(self) -> Status:
        status = super()._status()
        # It has no rows.
        workers = [replace(worker, max_rows=0, text_tokens=4096) for worker in status.workers]
        width = 0 if self.labels else WIDTH
        return replace(status, labels=self.labels, vector_width=width, workers=workers, max_running=0)

    @property
    def contexts(self) -> list[PoolingContext]:
        return [submit.context for submit in self.submits if isinstance(submit.context, PoolingContext)]

    def _take(self, router: zmq.Socket[bytes], replica: bytes, message: Any) -> None:
        if not isinstance(message, Submit) or not isinstance(message.context, PoolingContext):
            super()._take(router, replica, message)
            return
        self.submits.append(message)
        if self.refuse is not None:
            send_to(router, replica, self._refusal(message, self.refuse))
        elif not self.hold.is_set():
            half = (len(message.context) + 1) // 2
            parts = [
                Vectors(self.incarnation, message.handle, first, self.values(message.context.part(first, end)), 1500)
                for first, end in ((half, len(message.context)), (0, half))
                if first < end
            ]
            send_to(router, replica, *parts)

    def values(self, context: PoolingContext) -> PooledValues:
        rows: list[NDArray[np.float32]] = []
        for text in context.texts():
            match context.task:
                case PoolingTask.EMBED:
                    rows.append(shaped(vector_of(text), context)[None])
                case PoolingTask.EMBED_TOKENS:
                    rows.append(np.stack([shaped(vector_of(text[i : i + 1]), context) for i in range(len(text))]))
                case PoolingTask.SPARSE:
                    rows.append(np.array([(token, 0.5) for token in sorted(set(text.tolist()))], np.float32))
                case PoolingTask.CLASSIFY_TOKENS:
                    logits = np.stack([vector_of(text[i : i + 1], len(self.labels)) for i in range(len(text))])
                    rows.append(np.stack([activated(row) for row in logits]) if context.activate else logits)
                case _:
                    logits = vector_of(text, len(self.labels))
                    rows.append((activated(logits) if context.activate else logits)[None])
        return PooledValues(np.concatenate(rows), np.array([len(row) for row in rows], np.int32))


def shaped(vector: NDArray[np.float32], context: PoolingContext) -> NDArray[np.float32]:
    cut = vector[: context.dimensions]
    return cut / np.linalg.norm(cut) if context.normalize else cut


def activated(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    if len(logits) == 1:
        return (1 / (1 + np.exp(-logits))).astype(np.float32)
    weights = np.exp(logits - logits.max())
    found: NDArray[np.float32] = weights / weights.sum()
    return found


@dataclass(frozen=True)
class PoolingServer:
    live: LiveServer
    double: PoolingDouble
    tokenizer: Tokenizer

    @property
    def url(self) -> str:
        return self.live.url

    def ids(self, *texts: str) -> list[int]:
        """The token ids of a text, or of a pair."""
        found: list[int] = self.tokenizer.backend.encode(*texts).ids
        return found


Serve = Callable[..., AbstractContextManager[PoolingServer]]


@pytest.fixture
def serve(run_directory: RunDirectory) -> Serve:
    """Serves a checkpoint; further arguments are fields of the double."""

    @contextmanager
    def serve(model: Path, **fields: Any) -> Iterator[PoolingServer]:
        tokenizer = Tokenizer.load(str(model))
        double = PoolingDouble(
            run_directory.api_endpoint, lambda _: [], max_model_len=512, vocab_size=tokenizer.vocab_size, **fields
        )
        try:
            with serving(double, run_directory, tokenizer, Settings(model=str(model))) as live:
                yield PoolingServer(live, double, tokenizer)
        finally:
            double.close()

    return serve


@pytest.fixture
def embedding(serve: Serve, embedder: Path) -> Iterator[PoolingServer]:
    with serve(embedder) as server:
        yield server


@pytest.fixture
def reranking(serve: Serve, reranker: Path) -> Iterator[PoolingServer]:
    with serve(reranker, tasks=["classify"], labels=["LABEL_0"]) as server:
        yield server


@pytest.fixture
def classifying(serve: Serve, classifier: Path) -> Iterator[PoolingServer]:
    with serve(classifier, tasks=["classify"], labels=LABELS) as server:
        yield server
