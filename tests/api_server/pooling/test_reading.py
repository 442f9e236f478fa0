"""How much of a request is tokenized on the event loop, and how much before a request that is too long is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api_server.dialects.tei import routes
from api_server.dialects.tei.schema import PredictBody
from api_server.errors import ErrorKind, RequestFailed
from api_server.pooling.reading import Reading, read_pairs, read_texts
from api_server.text.pooled_model import PooledModel
from api_server.text.text_batches import BatchTokenizer
from api_server.text.tokenizer import Tokenizer
from shared.pooling_files import PoolingFiles
from tests.api_server.pooling.conftest import checkpoint

LIMIT = 512
# Characters of a request that may be tokenized on the event loop, with what a template has around its texts.
FEW = 2048


@dataclass
class Counted:
    """A tokenizer's backend that counts characters, those of the event loop's thread apart."""

    backend: Any
    loop: int = 0
    everywhere: int = 0
    thread: int = field(default_factory=threading.get_ident)

    def encode(self, *texts: str, **options: Any) -> Any:
        self._count(texts)
        return self.backend.encode(*texts, **options)

    def encode_batch_fast(self, texts: Sequence[str], **options: Any) -> Any:
        self._count(texts)
        return self.backend.encode_batch_fast(texts, **options)

    def _count(self, texts: Sequence[str]) -> None:
        size = sum(map(len, texts))
        self.everywhere += size
        if threading.get_ident() == self.thread:
            self.loop += size


@dataclass
class Reader:
    """What reading needs of a server, with its counts."""

    server: Any
    counted: Counted

    @classmethod
    def of(cls, path: Path) -> Reader:
        files = PoolingFiles.read(path)
        tokenizer = Tokenizer.load(str(path))
        counted = Counted(tokenizer.backend)
        batches = BatchTokenizer(counted, tokenizer.has_token_types)
        counted.loop = counted.everywhere = 0
        model = PooledModel(files.task, files)
        server = SimpleNamespace(
            pooled_model=model, tokenizer=tokenizer, batch_tokenizer=batches, token_marks=None, longest_text=LIMIT
        )
        return cls(server, counted)

    def pairs(self, pairs: Sequence[tuple[str, str]], instruction: str | None = None) -> Any:
        return asyncio.run(read_pairs(self.server, pairs, Reading(), instruction=instruction))

    def texts(self, texts: Sequence[str]) -> Any:
        return asyncio.run(read_texts(self.server, texts, Reading()))


@pytest.fixture
def decoder(tmp_path: Path) -> Reader:
    """A decoder that reranks in the form of Qwen3-Reranker."""
    path = checkpoint(tmp_path / "decoder", "Qwen3ForCausalLM", limit=LIMIT, model_type="qwen3")
    (path / "modules.json").write_text(
        '[{"path": "", "type": "x.Transformer"}, {"path": "1_LogitScore", "type": "x.LogitScore"}]'
    )
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 5, "false_token_id": 6}')
    return Reader.of(path)


@pytest.fixture
def encoder(tmp_path: Path) -> Reader:
    config: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "num_labels": 1}
    return Reader.of(checkpoint(tmp_path / "encoder", "BertForSequenceClassification", limit=LIMIT, **config))


@pytest.mark.parametrize("instruction", [None, "fox " * 100])
def test_a_template_is_counted_with_its_texts(decoder: Reader, instruction: str | None) -> None:
    pairs = [("q", "d")] * 64
    batch = decoder.pairs(pairs, instruction)
    assert len(batch.lengths) == 64
    assert decoder.counted.loop == 0
    decoder.counted.everywhere = 0
    alone = decoder.pairs(pairs[:1], instruction)
    assert alone.tokens.tolist() == batch.tokens[: batch.lengths[0]].tolist()
    # A short request is not worth a thread.
    assert 0 < decoder.counted.loop == decoder.counted.everywhere <= FEW


def test_a_long_instruction_is_tokenized_once_and_refused(decoder: Reader) -> None:
    instruction = "fox " * 10_000
    with pytest.raises(RequestFailed, match="instruct has 10000 tokens; this model takes at most 512") as error:
        decoder.pairs([("q", "d")] * 64, instruction)
    assert (error.value.kind, error.value.field) == (ErrorKind.TOO_LONG, "instruct")
    assert decoder.counted.loop == 0
    assert decoder.counted.everywhere <= len(instruction)


def test_a_long_query_is_tokenized_once_and_refused(decoder: Reader) -> None:
    query = "fox " * 10_000
    with pytest.raises(RequestFailed, match=r"the text beside input\[0\] has 10\d\d\d tokens"):
        decoder.pairs([(query, "d")] * 64, "short")
    assert decoder.counted.loop == 0
    assert decoder.counted.everywhere <= 2 * len(query)


def test_small_groups_of_one_request_do_not_add_up_on_the_event_loop(encoder: Reader, decoder: Reader) -> None:
    for count in (65, 2048):
        texts = [f"the fox {i}" for i in range(count)]
        assert len(encoder.texts(texts).lengths) == count
        assert len(encoder.pairs([("q", text) for text in texts]).lengths) == count
    assert len(decoder.pairs([("q", "d")] * 300).lengths) == 300
    assert encoder.counted.loop == decoder.counted.loop == 0
    several = encoder.texts(texts[:64])
    assert encoder.counted.loop == sum(map(len, texts[:64]))
    assert several.lengths.tolist() == [len(each) for each in several.tokens.reshape(64, -1)]


def test_texts_and_pairs_by_turns_do_not_add_up_on_the_event_loop(encoder: Reader) -> None:
    call: Any = SimpleNamespace(server=encoder.server)
    sequences: list[str | tuple[str, str]] = ["the fox", ("fox", "jumps")] * 100
    body = PredictBody(inputs=[["a text"]])
    batch = asyncio.run(routes._sequences(call, sequences, body))
    assert len(batch.lengths) == 200
    assert encoder.counted.loop == 0
    asyncio.run(routes._sequences(call, ["the fox"] * 3, body))
    assert encoder.counted.loop == 3 * len("the fox")
