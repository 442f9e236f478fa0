"""Classifiers, rerankers and sparse vectors, against transformers' whole models run text by text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from interfaces import PoolingContext, PoolingTask
from model_worker.pooling.load import load_pooling
from tests.model_worker.pooling.tiny_encoders import VOCAB, random_texts, save, write, write_modules

CLASSIFIERS = [
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert", "ernie", "modernbert"),
    *("eurobert", "nomic_bert", "gte", "jina_embeddings_v3", "qwen3", "llama", "mistral", "gemma2"),
    *("mpnet", "deberta-v2", "roformer"),
]


def logits(auto: Any, path: Path, texts: list[NDArray[np.int32]], types: list[int] | None = None) -> list[torch.Tensor]:
    model = auto.from_pretrained(path).eval()
    arguments = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return [model(input_ids=torch.tensor([text.tolist()]), **arguments).logits[0].double() for text in texts]


def assert_close(got: NDArray[Any], want: torch.Tensor, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_texts_get_the_probabilities_of_their_labels(name: str, labels: int, tmp_path: Path) -> None:
    path = save(name, tmp_path, AutoModelForSequenceClassification, num_labels=labels)
    pooler = load_pooling(path)
    texts = random_texts(6)
    want = torch.stack(logits(AutoModelForSequenceClassification, path, texts))
    assert pooler.tasks == {PoolingTask.CLASSIFY}
    assert (len(pooler.labels), pooler.hidden_size) == (labels, 0)
    values, rows = pooler.run(PoolingContext.of(texts, PoolingTask.CLASSIFY, activate=False))
    assert rows.tolist() == [1] * 6
    assert_close(values, want)
    values, _ = pooler.run(PoolingContext.of(texts, PoolingTask.CLASSIFY))
    assert_close(values, torch.sigmoid(want) if labels == 1 else torch.softmax(want, dim=1))


def test_a_model_of_several_labels_is_no_reranker(tmp_path: Path) -> None:
    path = save("bert", tmp_path, AutoModelForSequenceClassification, num_labels=2)
    with pytest.raises(ValueError, match="it gives 2 values for a pair, and a reranker one; use task classify"):
        load_pooling(path, task="rerank")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    pooler = load_pooling(save("bert", tmp_path, AutoModelForSequenceClassification, num_labels=2))
    with torch.no_grad():
        pooler.head.head._model.classifier.bias.fill_(torch.inf)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="are not finite: use dtype float32"):
        pooler.run(PoolingContext.of(random_texts(2), PoolingTask.CLASSIFY, activate=False))


def test_labels_that_exclude_nothing_have_a_probability_each(tmp_path: Path) -> None:
    path = save(
        "bert",
        tmp_path,
        AutoModelForSequenceClassification,
        id2label={0: "kind", 1: "rude", 2: "loud"},
        label2id={"kind": 0, "rude": 1, "loud": 2},
        problem_type="multi_label_classification",
    )
    pooler = load_pooling(path)
    assert pooler.labels == ["kind", "rude", "loud"]
    texts = random_texts(3)
    values, _ = pooler.run(PoolingContext.of(texts, PoolingTask.CLASSIFY))
    assert_close(values, torch.sigmoid(torch.stack(logits(AutoModelForSequenceClassification, path, texts))))


def test_modernbert_may_classify_by_the_mean(tmp_path: Path) -> None:
    path = save("modernbert", tmp_path, AutoModelForSequenceClassification, num_labels=1, classifier_pooling="mean")
    texts = random_texts(5)
    values, _ = load_pooling(path).run(PoolingContext.of(texts, PoolingTask.CLASSIFY, activate=False))
    assert_close(values, torch.stack(logits(AutoModelForSequenceClassification, path, texts)))


def test_the_two_halves_of_a_pair_have_types(tmp_path: Path) -> None:
    path = save("bert", tmp_path, AutoModelForSequenceClassification, num_labels=1)
    pooler = load_pooling(path)
    (text,) = random_texts(1)
    types = [0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2)
    context = PoolingContext.of([text], PoolingTask.CLASSIFY, token_types=np.array(types, np.int8), activate=False)
    (want,) = logits(AutoModelForSequenceClassification, path, [text], types)
    assert_close(pooler.run(context)[0][0], want)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "deberta-v2", "qwen3"])
def test_tokens_get_the_probabilities_of_their_labels(name: str, tmp_path: Path) -> None:
    path = save(name, tmp_path, AutoModelForTokenClassification, num_labels=4)
    pooler = load_pooling(path)
    texts = random_texts(4)
    values, rows = pooler.run(PoolingContext.of(texts, PoolingTask.CLASSIFY_TOKENS))
    assert rows.tolist() == [len(text) for text in texts]
    want = torch.softmax(torch.cat(logits(AutoModelForTokenClassification, path, texts)), dim=1)
    assert_close(values, want)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "mpnet"])
@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_words_get_weights(name: str, strategy: str, activation: str, tmp_path: Path) -> None:
    path = save(name, tmp_path, AutoModelForMaskedLM)
    write_modules(
        path,
        "MLMTransformer",
        "SpladePooling",
        configs=[{"pooling_strategy": strategy, "activation_function": activation}],
    )
    pooler = load_pooling(path)
    assert pooler.tasks == {PoolingTask.SPARSE}
    texts = random_texts(4)
    values, rows = pooler.run(PoolingContext.of(texts, PoolingTask.SPARSE))
    for found, each in zip(
        np.split(values, np.cumsum(rows)[:-1]), logits(AutoModelForMaskedLM, path, texts), strict=True
    ):
        weights = each.relu().log1p()
        if activation == "log1p_relu":
            weights = weights.log1p()
        want = weights.amax(0) if strategy == "max" else weights.sum(0)
        dense = np.zeros(VOCAB)
        dense[found[:, 0].astype(int)] = found[:, 1]
        assert (np.diff(found[:, 0]) > 0).all()
        assert_close(dense, want)


@pytest.mark.parametrize(("yes", "no"), [(17, 23), (17, None)])
def test_decoders_score_pairs_by_the_logits_of_two_tokens(yes: int, no: int | None, tmp_path: Path) -> None:
    path = save("qwen3", tmp_path, AutoModelForCausalLM)
    write_modules(path, "Transformer", "LogitScore", configs=[{"true_token_id": yes, "false_token_id": no}])
    pooler = load_pooling(path)
    assert pooler.tasks == {PoolingTask.CLASSIFY}
    assert len(pooler.labels) == 1
    texts = random_texts(5)
    last = torch.stack([each[-1] for each in logits(AutoModelForCausalLM, path, texts)])
    raw = last[:, yes] - (0 if no is None else last[:, no])
    values, _ = pooler.run(PoolingContext.of(texts, PoolingTask.CLASSIFY, activate=False))
    assert_close(values[:, 0], raw)
    values, _ = pooler.run(PoolingContext.of(texts, PoolingTask.CLASSIFY))
    assert_close(values[:, 0], torch.sigmoid(raw))


def test_a_decoder_without_a_score_module_reranks_by_its_words_for_yes_and_no(tmp_path: Path) -> None:
    path = save("qwen3", tmp_path, AutoModelForCausalLM)
    with pytest.raises(ValueError, match="neither a LogitScore module nor the tokens"):
        load_pooling(path, task="rerank")
    write(path, "tokenizer.json", {"model": {"vocab": {"yes": 9, "no": 4}}})
    texts = random_texts(3)
    last = torch.stack([each[-1] for each in logits(AutoModelForCausalLM, path, texts)])
    values, _ = load_pooling(path, task="rerank").run(PoolingContext.of(texts, PoolingTask.CLASSIFY))
    # The softmax over both.
    assert_close(values[:, 0], torch.softmax(last[:, [4, 9]], dim=1)[:, 1])


def test_a_model_that_generates_can_embed(tmp_path: Path) -> None:
    path = save("qwen3", tmp_path, AutoModelForCausalLM)
    pooler = load_pooling(path, task="embed")
    assert pooler.tasks == {PoolingTask.EMBED, PoolingTask.EMBED_TOKENS}
