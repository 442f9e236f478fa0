"""Checkpoints with a Router: queries and documents go through modules of their own, as in sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import AutoModelForMaskedLM, AutoTokenizer

from interfaces import PoolingContext, PoolingTask
from model_worker.model import ModelRefused
from model_worker.pooling.load import load_pooling
from shared.pooling_files import PoolingFiles
from tests.model_worker.pooling.tiny_encoders import VOCAB, save, save_tokenizer

TEXTS = ["w7 w8 w9", "w10 w11", "w12 w7 w7 w13 w14 w15"]


def bare(path: Path, masked: bool = False) -> Path:
    save("bert", path, **({"auto": AutoModelForMaskedLM} if masked else {}))
    save_tokenizer(path)
    return path


def ids(files: PoolingFiles, special: bool = True) -> list[list[int]]:
    found: list[list[int]] = AutoTokenizer.from_pretrained(files.tokenizer_source)(TEXTS, add_special_tokens=special)[
        "input_ids"
    ]
    return found


@pytest.mark.parametrize("first", [False, True])
def test_vectors_of_queries_and_documents_are_those_of_sentence_transformers(first: bool, tmp_path: Path) -> None:
    """With the Router behind the transformer, and with the transformer inside of both routes."""
    transformer, pooling = Transformer(str(bare(tmp_path / "bare"))), Pooling(48, "mean")
    torch.manual_seed(0)
    query, document = Dense(48, 12), Dense(48, 12, activation_function=torch.nn.Identity())
    modules: list[torch.nn.Module]
    if first:
        router = Router.for_query_document([transformer, pooling, query], [transformer, pooling, document])
        modules = [router, Normalize()]
    else:
        modules = [transformer, pooling, Router.for_query_document([query], [document]), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    path = tmp_path / "saved"
    model.save(str(path))
    files = PoolingFiles.read(path)
    assert files.task == "embed"
    assert set(files.routes) == {"query", "document"}
    pooler = load_pooling(path)
    texts = ids(files)
    for name, want in (
        ("query", model.encode_query(TEXTS)),
        ("document", model.encode_document(TEXTS)),
        (None, model.encode(TEXTS)),
    ):
        context = PoolingContext.of(texts, PoolingTask.EMBED, route=files.route(name))
        np.testing.assert_allclose(pooler.run(context)[0], want, atol=1e-5)


def test_words_of_queries_get_the_weights_that_are_listed(tmp_path: Path) -> None:
    transformer = Transformer(str(bare(tmp_path / "bare", masked=True)), transformer_task="fill-mask")
    weights = torch.rand(VOCAB, generator=torch.Generator().manual_seed(1)) + 0.5
    weights[7] = 0
    static = SparseStaticEmbedding(transformer.tokenizer, weights)
    model = SparseEncoder(
        modules=[Router.for_query_document([static], [transformer, SpladePooling("max")])], device="cpu"
    )
    path = tmp_path / "saved"
    model.save(str(path))
    files = PoolingFiles.read(path)
    assert files.task == "sparse"
    assert (files.is_static("query"), files.is_static("document"), files.is_static("")) == (True, False, False)
    pooler = load_pooling(path)
    for name, want in (("query", model.encode_query(TEXTS)), ("document", model.encode_document(TEXTS))):
        texts = ids(files, special=name == "document")
        context = PoolingContext.of(texts, PoolingTask.SPARSE, route=files.route(name))
        values, rows = pooler.run(context)
        for found, dense in zip(np.split(values, np.cumsum(rows)[:-1]), want.to_dense().numpy(), strict=True):
            got = np.zeros(VOCAB)
            got[found[:, 0].astype(int)] = found[:, 1]
            np.testing.assert_allclose(got, dense, atol=1e-5)


def test_what_cannot_be_served_is_refused_with_a_reason(tmp_path: Path) -> None:
    one, other = (Transformer(str(bare(tmp_path / name))) for name in ("one", "other"))
    two = Router.for_query_document([one, Pooling(48, "mean")], [other, Pooling(48, "mean")])
    SentenceTransformer(modules=[two], device="cpu").save(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="go through 2 transformers"):
        PoolingFiles.read(tmp_path / "two")
    widths = Router.for_query_document([Dense(48, 12)], [Dense(48, 10)])
    modules = [one, Pooling(48, "mean"), widths]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "widths"))
    with pytest.raises(ModelRefused, match="have 12 numbers and others 10"):
        load_pooling(tmp_path / "widths")
