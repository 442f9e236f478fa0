"""Checkpoints as sentence-transformers writes them, against what sentence-transformers computes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from interfaces import PoolingContext, PoolingTask
from model_worker.model import ModelRefused
from model_worker.pooling.load import load_pooling
from shared.pooling_files import PoolingFiles
from tests.model_worker.pooling.tiny_encoders import VOCAB, save, save_tokenizer, write, write_modules

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def sentences(count: int = 7) -> list[str]:
    rng = np.random.default_rng()
    return [" ".join(f"w{i}" for i in rng.integers(4, VOCAB, rng.integers(1, 50))) for _ in range(count)]


def encoder(path: Path, name: str, *modules: torch.nn.Module, auto: Any = None, **options: Any) -> Path:
    """A checkpoint of sentence-transformers' own: a tiny model, its tokenizer and modules behind it."""
    bare = path / "bare"
    save(name, bare, **({} if auto is None else {"auto": auto}))
    save_tokenizer(bare)
    model = SentenceTransformer(modules=[Transformer(str(bare)), *modules], device="cpu", **options)
    model.save(str(path / "saved"))
    return path / "saved"


def tokens(path: Path, texts: list[str], pairs: list[str] | None = None) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids: list[list[int]] = tokenizer(texts, pairs)["input_ids"]
    return ids


def embed(path: Path, texts: list[str], task: PoolingTask = PoolingTask.EMBED, **options: Any) -> NDArray[np.float32]:
    return load_pooling(path).run(PoolingContext.of(tokens(path, texts), task, **options))[0]


def assert_close(got: NDArray[Any], want: Any) -> None:
    want = np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("mode", [*MODES, ("mean", "lasttoken"), ("lasttoken", "cls", "max")])
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_each_pooling_mode_gives_the_vectors_of_sentence_transformers(name: str, mode: Any, tmp_path: Path) -> None:
    path = encoder(tmp_path, name, Pooling(48, mode))
    texts = sentences()
    want = SentenceTransformer(str(path), device="cpu").encode(texts)
    assert_close(embed(path, texts, normalize=False), want)
    cosines = (embed(path, texts) * want / np.linalg.norm(want, axis=1, keepdims=True)).sum(1)
    assert cosines.min() > 0.99999


@pytest.mark.parametrize(
    "old",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode_weightedmean_tokens": True, "pooling_mode_lasttoken": True, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_sqrt_len_tokens": True},
        {},
    ],
)
def test_the_older_form_of_a_pooling_config_means_the_same(old: dict[str, bool], tmp_path: Path) -> None:
    path = encoder(tmp_path, "bert", Pooling(48, "mean"))
    write(path, "1_Pooling/config.json", {"word_embedding_dimension": 48} | old)
    texts = sentences()
    assert_close(embed(path, texts, normalize=False), SentenceTransformer(str(path), device="cpu").encode(texts))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "mpnet", "qwen3", "llama"])
def test_dense_layers_and_normalization_follow_the_pooling(name: str, tmp_path: Path) -> None:
    modules = (
        Pooling(48, "mean"),
        Dense(48, 20),
        Dense(20, 12, bias=False, activation_function=torch.nn.GELU()),
        Normalize(),
    )
    path = encoder(tmp_path, name, *modules)
    texts = sentences()
    model = SentenceTransformer(str(path), device="cpu")
    assert load_pooling(path).hidden_size == 12
    assert_close(embed(path, texts), model.encode(texts))
    assert_close(embed(path, texts, dimensions=5), model.encode(texts, truncate_dim=5, normalize_embeddings=True))


def test_tokens_of_a_prompt_can_be_left_out_of_the_pooling(tmp_path: Path) -> None:
    for mode in MODES:
        path = encoder(
            tmp_path / mode,
            "bert",
            Pooling(48, mode, include_prompt=False),
            prompts={"query": "w4 w5 w6 "},
            default_prompt_name="query",
        )
        files = PoolingFiles.read(path)
        assert (files.includes_prompt, files.prompt()) == (False, "w4 w5 w6 ")
        texts = sentences()
        want = SentenceTransformer(str(path), device="cpu").encode(texts)
        ids = tokens(path, [files.prompt() + text for text in texts])
        # [CLS] and the prompt's words: sentence-transformers counts the prompt's tokens without the last [SEP].
        types = np.concatenate([[-1] * 4 + [0] * (len(each) - 4) for each in ids]).astype(np.int8)
        context = PoolingContext.of(ids, PoolingTask.EMBED, token_types=types, normalize=False)
        assert_close(load_pooling(path).run(context)[0], want)


def test_late_interaction_keeps_a_vector_for_each_token(tmp_path: Path) -> None:
    dense = Dense(48, 16, bias=False, activation_function=torch.nn.Identity())
    path = encoder(tmp_path, "bert", dense)
    write_modules(path, "Transformer", "Dense")
    files = PoolingFiles.read(path)
    assert files.task == "embed_tokens"
    pooler = load_pooling(path)
    assert pooler.tasks == {PoolingTask.EMBED_TOKENS}
    assert pooler.hidden_size == 16
    texts = sentences(3)
    values, rows = pooler.run(PoolingContext.of(tokens(path, texts), PoolingTask.EMBED_TOKENS))
    bare = SentenceTransformer(modules=[Transformer(str(tmp_path / "bare")), Pooling(48, "mean")], device="cpu")
    weight = dense.linear.weight.detach().numpy()
    for found, states in zip(
        np.split(values, np.cumsum(rows)[:-1]), bare.encode(texts, output_value="token_embeddings"), strict=True
    ):
        want = states.numpy() @ weight.T
        assert_close(found, want / np.linalg.norm(want, axis=1, keepdims=True))


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_sparse_encoders_give_the_weights_of_sentence_transformers(strategy: Any, tmp_path: Path) -> None:
    bare = save("bert", tmp_path / "bare", AutoModelForMaskedLM)
    save_tokenizer(bare)
    modules = [Transformer(str(bare), transformer_task="fill-mask"), SpladePooling(strategy)]
    SparseEncoder(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    path = tmp_path / "saved"
    assert PoolingFiles.read(path).task == "sparse"
    texts = sentences(4)
    want = SparseEncoder(str(path), device="cpu").encode(texts, convert_to_sparse_tensor=False).numpy()
    values, rows = load_pooling(path).run(PoolingContext.of(tokens(path, texts), PoolingTask.SPARSE))
    for found, dense in zip(np.split(values, np.cumsum(rows)[:-1]), want, strict=True):
        got = np.zeros(VOCAB)
        got[found[:, 0].astype(int)] = found[:, 1]
        assert_close(got, dense)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "deberta-v2"])
def test_cross_encoders_give_the_scores_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    bare = save(name, tmp_path / "bare", AutoModelForSequenceClassification, num_labels=1)
    save_tokenizer(bare)
    CrossEncoder(str(bare), device="cpu").save(str(tmp_path / "saved"))
    path = tmp_path / "saved"
    assert PoolingFiles.read(path).task == "rerank"
    query, documents = "w7 w8", sentences(5)
    model = CrossEncoder(str(path), device="cpu")
    want = model.predict([(query, document) for document in documents])
    encoded = model.tokenizer([query] * 5, documents)
    types = encoded.get("token_type_ids")
    context = PoolingContext.of(
        encoded["input_ids"],
        PoolingTask.CLASSIFY,
        token_types=None if types is None else np.concatenate(types).astype(np.int8),
    )
    assert_close(load_pooling(path).run(context)[0][:, 0], want)


@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoders_may_score_a_pooled_vector(labels: int, tmp_path: Path) -> None:
    bare = save("bert", tmp_path / "bare")
    save_tokenizer(bare)
    dense = Dense(
        48,
        labels,
        activation_function=torch.nn.Identity(),
        module_input_name="sentence_embedding",
        module_output_name="scores",
    )
    modules = [Transformer(str(bare)), Pooling(48, "cls"), dense]
    CrossEncoder(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    path = tmp_path / "saved"
    assert PoolingFiles.read(path).task == ("rerank" if labels == 1 else "classify")
    documents = sentences(4)
    model = CrossEncoder(str(path), device="cpu")
    want = model.predict([("w7", document) for document in documents], activation_fn=torch.nn.Identity())
    encoded = model.tokenizer(["w7"] * 4, documents)
    types = np.concatenate(encoded["token_type_ids"]).astype(np.int8)
    context = PoolingContext.of(encoded["input_ids"], PoolingTask.CLASSIFY, token_types=types, activate=False)
    assert_close(load_pooling(path).run(context)[0], np.reshape(want, (4, labels)))


def test_decoders_with_a_template_give_the_scores_of_sentence_transformers(tmp_path: Path) -> None:
    bare = save("llama", tmp_path / "bare", AutoModelForCausalLM)
    tokenizer = save_tokenizer(bare)
    (bare / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] == 'query' %}w9 {{ m['content'] }} w10 "
        "{% elif m['role'] == 'document' %}{{ m['content'] }}{% endif %}{% endfor %} w11 w12"
    )
    transformer = Transformer(str(bare), transformer_task="text-generation")
    CrossEncoder(modules=[transformer, LogitScore(20, 21)], device="cpu").save(str(tmp_path / "saved"))
    path = tmp_path / "saved"
    files = PoolingFiles.read(path)
    assert (files.task, files.score_tokens) == ("rerank", (20, 21))
    template = files.pair_template
    assert template is not None

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    query, documents = "w7 w8", sentences(5)
    model = CrossEncoder(str(path), device="cpu")
    want = model.predict([(query, document) for document in documents], activation_fn=torch.nn.Sigmoid())
    ids = [
        [token for part in (template.prefix, template.body(query, document), template.suffix) for token in encode(part)]
        for document in documents
    ]
    values, _ = load_pooling(path).run(PoolingContext.of(ids, PoolingTask.CLASSIFY))
    assert_close(values[:, 0], want)


@pytest.mark.parametrize(
    ("kinds", "configs", "complaint"),
    [
        (("Pooling", "WordWeights"), [{}, {}], "has a WordWeights module; Transformer, Pooling, Dense"),
        (("Pooling", "Pooling"), [{}, {}], "has two Pooling modules, and one is possible"),
        (("Pooling", "Dense"), [{}, {}], r"2_Dense has no model\.safetensors: save the model with a newer"),
        (("Pooling",), [{"pooling_mode": "median"}], r"1_Pooling/config\.json: pooling_mode 'median' is unknown"),
    ],
)
def test_modules_that_are_unknown_are_refused_by_name(
    kinds: tuple[str, ...], configs: list[dict[str, Any]], complaint: str, tmp_path: Path
) -> None:
    path = save("bert", tmp_path)
    write_modules(path, "Transformer", *kinds, configs=configs)
    with pytest.raises(ValueError, match=complaint):
        load_pooling(path)


def test_a_dense_layer_must_fit_what_comes_before(tmp_path: Path) -> None:
    path = encoder(tmp_path, "bert", Pooling(48, "mean"), Dense(48, 20))
    config = json.loads((path / "2_Dense/config.json").read_text())
    write(path, "2_Dense/config.json", config | {"activation_function": "os.system"})
    with pytest.raises(ModelRefused, match="activation_function 'system'; GELU, Identity"):
        load_pooling(path)
    write(path, "2_Dense/config.json", config)
    write(path, "1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]})
    with pytest.raises(
        ModelRefused, match=r"2_Dense has a linear\.weight of \[20, 48\], and its inputs have 96 numbers"
    ):
        load_pooling(path)
