"""Vectors, scores and labels from `LLM`, against sentence-transformers on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from deploy.offline import LLM
from tests.model_worker.pooling.tiny_encoders import VOCAB, save, save_tokenizer

LABELS = {0: "kind", 1: "rude", 2: "loud"}


def sentences(count: int) -> list[str]:
    rng = np.random.default_rng()
    return [" ".join(f"w{i}" for i in rng.integers(4, VOCAB, rng.integers(1, 50))) for _ in range(count)]


def checkpoint(path: Path, auto: Any, name: str = "bert", **values: Any) -> Path:
    save(name, path, auto, **values)
    save_tokenizer(path)
    return path


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    from transformers import AutoModel

    bare = checkpoint(tmp_path / "bare", AutoModel)
    modules = [Transformer(str(bare)), Pooling(48, "mean"), Normalize()]
    model = SentenceTransformer(modules=modules, prompts={"query": "w9 w8 "}, device="cpu")
    model.save(str(tmp_path / "saved"))
    texts = sentences(6)
    with LLM(tmp_path / "saved") as llm:
        np.testing.assert_allclose(llm.embed(texts), model.encode(texts), atol=1e-5)
        np.testing.assert_allclose(
            llm.embed(texts, "query", dimensions=8),
            model.encode(texts, prompt_name="query", truncate_dim=8, normalize_embeddings=True),
            atol=1e-5,
        )
        long = " ".join(["w5"] * 300)
        with pytest.raises(ValueError, match=r"texts\[1\] has 302 tokens; this model takes at most 128"):
            llm.embed(["w5", long])
        np.testing.assert_allclose(llm.embed(long, truncate=True), model.encode([long]), atol=1e-5)
        with pytest.raises(ValueError, match="prompt_name 'other' is unknown: this model has document, query"):
            llm.embed("w5", "other")
        with pytest.raises(ValueError, match="task 'classify' is not what BertModel does: it does embed, embed_tokens"):
            llm.classify("w5")
        assert llm.embed([]).size == 0


def test_documents_are_ranked_as_by_sentence_transformers(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, AutoModelForSequenceClassification, num_labels=1)
    documents = sentences(6)
    want = CrossEncoder(str(path), device="cpu").predict([("w7 w9", document) for document in documents])
    with LLM(path) as llm:
        ranked = llm.rerank("w7 w9", documents)
        assert [each.index for each in ranked] == np.argsort(-want, kind="stable").tolist()
        np.testing.assert_allclose([each.score for each in ranked], np.sort(want)[::-1], atol=1e-5)
        with pytest.raises(ValueError, match="instruction: this reranker takes none"):
            llm.rerank("w7", documents, "Find")
        assert llm.rerank("w7", []) == []


def test_labels_have_probabilities(tmp_path: Path) -> None:
    names = {name: i for i, name in LABELS.items()}
    path = checkpoint(tmp_path, AutoModelForSequenceClassification, id2label=LABELS, label2id=names)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    (text,) = sentences(1)
    ids = [2, *(int(word[1:]) for word in text.split()), 3]
    with torch.no_grad():
        want = torch.softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=0).tolist()
    with LLM(path) as llm:
        (found,) = llm.classify(text)
    assert found.keys() == names.keys()
    np.testing.assert_allclose(list(found.values()), want, atol=1e-5)


def test_a_decoder_reranks_by_its_words_for_yes_and_no(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, AutoModelForCausalLM, "qwen3")
    text = (path / "tokenizer.json").read_text().replace('"w20"', '"yes"').replace('"w21"', '"no"')
    (path / "tokenizer.json").write_text(text)
    documents = sentences(4)
    with LLM(path) as llm:
        first = {each.index: each.score for each in llm.rerank("w7", documents)}
        assert set(first) == set(range(4))
        assert all(0 < score < 1 for score in first.values())
        # The instruction is part of what the model reads.
        assert {each.index: each.score for each in llm.rerank("w7", documents, "w30 w31")} != first
