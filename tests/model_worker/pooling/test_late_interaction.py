"""ColBERT's queries and documents as sentence-transformers has them, and the three heads of BGE-M3."""

from __future__ import annotations

import pickle
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from api_server.text.late_interaction import keep_whole, token_marks
from api_server.text.text_batches import BatchTokenizer, Bounds
from interfaces import PoolingContext, PoolingTask
from model_worker.model import ModelRefused
from model_worker.pooling.attention import PACKED_ATTENTION, packed
from model_worker.pooling.heads import VectorHead
from model_worker.pooling.load import load_pooling
from model_worker.pooling.modules import VectorModules
from model_worker.pooling.several_heads import with_other_heads
from model_worker.pooling.texts import Texts
from shared.pooling_files import PoolingFiles
from tests.model_worker.pooling.tiny_encoders import VOCAB, save, write, write_modules

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
WIDTH = 16
QUERIES = ["w20 w21 , w22", "w30"]
DOCUMENTS = ["w20 , w21 w22 .", "w40 ! w41", " ".join(f"w{i}" for i in range(50, 75))]


def tokenizer(path: Path) -> None:
    """Words and punctuation, with BERT's frame."""
    words = [*SPECIAL, *string.punctuation]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"w{i}" for i in range(len(words), VOCAB))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL[:5]}
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=128, **names).save_pretrained(path)


def dense(path: Path, width: int = 48) -> None:
    (path / "1_Dense").mkdir()
    weight = torch.randn(WIDTH, width) / width**0.5
    save_file({"linear.weight": weight}, path / "1_Dense" / "model.safetensors")
    config = {
        "in_features": width,
        "out_features": WIDTH,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "module_input_name": "token_embeddings",
        "module_output_name": "token_embeddings",
    }
    write(path, "1_Dense/config.json", config)


def native(path: Path, strategy: str, attend: bool) -> Path:
    """A checkpoint as sentence-transformers writes it."""
    save("bert", path, pad_token_id=0)
    tokenizer(path)
    dense(path)
    package = "sentence_transformers"
    kinds = {
        "": f"{package}.base.modules.transformer.Transformer",
        "1_Dense": f"{package}.base.modules.dense.Dense",
        "2_MultiVectorMask": f"{package}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    }
    modules = [{"idx": i, "name": str(i), "path": name, "type": kind} for i, (name, kind) in enumerate(kinds.items())]
    write(path, "modules.json", modules)
    write(path, "2_MultiVectorMask/config.json", {"skiplist_words": [",", ".", "no-such-word"]})
    expansion = {"strategy": strategy, "attend": attend, "length": 8}
    write(path, "sentence_bert_config.json", {"query_expansion": expansion, "document_length": 20})
    prompts = {"query": "w100 ", "document": "w101 "}
    write(path, "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder", "prompts": prompts})
    return path


def pylate(path: Path, **values: Any) -> Path:
    """A checkpoint as PyLate writes it."""
    save("bert", path, pad_token_id=0)
    tokenizer(path)
    dense(path)
    write_modules(path, "Transformer", "Dense")
    kinds = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    kinds.append({"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"})
    write(path, "modules.json", kinds)
    usual = {"query_length": 9, "document_length": 20, "query_prefix": "[unused0] ", "document_prefix": "[unused1] "}
    write(path, "config_sentence_transformers.json", {"model_type": "ColBERT", **usual, **values})
    # PyLate leaves the limit of the last text, without its prefix.
    write(path, "sentence_bert_config.json", {"max_seq_length": 8, "do_lower_case": False})
    return path


def stanford(path: Path, **values: Any) -> Path:
    """A checkpoint as Stanford's ColBERT writes it."""
    save("bert", path, pad_token_id=0, architectures=["HF_ColBERT"])
    tokenizer(path)
    config = (path / "config.json").read_text().replace('"BertModel"', '"HF_ColBERT"')
    (path / "config.json").write_text(config)
    weights = {f"bert.{name}": value for name, value in load_file(path / "model.safetensors").items()}
    projection = torch.randn(WIDTH, 48) / 7
    save_file({**weights, "linear.weight": projection}, path / "model.safetensors", {"format": "pt"})
    write(path, "artifact.metadata", {"query_maxlen": 10, "doc_maxlen": 20, **values})
    return path


def found(path: Path, texts: Sequence[str], kind: str) -> list[NDArray[np.float32]]:
    """Read texts as the API server does, and compute them as the worker does."""
    files = PoolingFiles.read(path)
    fast: Any = PreTrainedTokenizerFast.from_pretrained(path)
    backend = fast.backend_tokenizer
    keep_whole(backend, files.prompt_tokens)
    marks = token_marks(files, backend)
    assert marks is not None
    bounds = Bounds(limit=marks.rules.most_tokens(kind) or 128, truncate=True)
    prompt = files.prompt(kind)
    batch = BatchTokenizer(backend, True).texts([prompt + text for text in texts], bounds)
    batch = marks.mark(batch, kind)
    context = PoolingContext(
        tokens=batch.tokens, lengths=batch.lengths, token_types=batch.token_types, task=PoolingTask.EMBED_TOKENS
    )
    values, rows = load_pooling(path, dtype="float32").run(context)
    return np.split(values, np.cumsum(rows)[:-1])


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (native, {"strategy": "fixed", "attend": False}),
        (native, {"strategy": "min", "attend": True}),
        (pylate, {}),
        (pylate, {"attend_to_expansion_tokens": True, "skiplist_words": ["!"]}),
        (pylate, {"do_query_expansion": False}),
        (stanford, {}),
        (stanford, {"mask_punctuation": False, "attend_to_mask_tokens": True}),
    ],
)
def test_queries_and_documents_are_those_of_sentence_transformers(
    make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    path = make(tmp_path / "model", **options)
    assert PoolingFiles.read(path).task == "embed_tokens"
    model = MultiVectorEncoder(str(path), device="cpu")
    for kind, texts, encode in (
        ("query", QUERIES, model.encode_query),
        ("document", DOCUMENTS, model.encode_document),
    ):
        want = encode(texts, convert_to_numpy=True)
        got = found(path, texts, kind)
        assert [len(each) for each in got] == [len(each) for each in want], kind
        for ours, theirs in zip(got, want, strict=True):
            unit = theirs / np.linalg.norm(theirs, axis=1, keepdims=True)
            np.testing.assert_allclose(ours, unit, atol=1e-5)


@pytest.mark.parametrize("name", ["modernbert", "mpnet", "deberta-v2", "albert"])
def test_a_query_of_any_encoder_ends_in_tokens_that_none_sees(name: str, tmp_path: Path) -> None:
    """As transformers computes them behind an attention mask, on fused layers, packed and padded. The last of them are
    further from all that are seen than a window reaches."""
    path = save(name, tmp_path)
    auto: Any = AutoModel
    model = auto.from_pretrained(path).eval()
    ids = torch.tensor([[5, 6, 7, 8, *[9] * 7]])
    with torch.no_grad():
        mask = torch.tensor([[*[1] * 4, *[0] * 7]])
        want = model(input_ids=ids, attention_mask=mask).last_hidden_state[0].numpy()
    types = np.array([*[0] * 4, *[-2] * 7, 0, 0], np.int8)
    context = PoolingContext.of(
        [ids[0].tolist(), [11, 12]], PoolingTask.EMBED_TOKENS, token_types=types, normalize=False
    )
    pooler = load_pooling(path, dtype="float32")
    values, rows = pooler.run(context)
    assert rows.tolist() == [11, 2]
    np.testing.assert_allclose(values[:11], want, atol=3e-5 * np.abs(want).max())


def test_capped_attention_of_a_token_that_sees_nothing_is_zero() -> None:
    q, k, v = torch.randn(3, 1, 2, 11, 8, generator=torch.Generator().manual_seed(0))
    attend = ALL_ATTENTION_FUNCTIONS[PACKED_ATTENTION]
    with packed(Texts(torch.arange(11), (11,), seen=(4,))):
        want, _ = attend(torch.nn.Module(), q, k, v, None, is_causal=False, sliding_window=3)
        # So high a cap changes nothing.
        got, _ = attend(torch.nn.Module(), q, k, v, None, is_causal=False, sliding_window=3, softcap=1e3)
    assert not got[:, 6:].any()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_limits_are_those_of_the_longest_kind_of_text(tmp_path: Path) -> None:
    path = pylate(tmp_path)
    assert PoolingFiles.read(path).max_tokens == 20
    with pytest.raises(ValueError, match="max_model_len must be at least 9, the tokens of this model's queries, got 8"):
        load_pooling(path, max_model_len=8)
    pylate_of_long_queries = {"model_type": "ColBERT", "query_length": 300}
    write(path, "config_sentence_transformers.json", pylate_of_long_queries)
    with pytest.raises(ValueError, match="makes queries 300 tokens long, and the model takes 200: lower the length"):
        load_pooling(path)


def test_impossible_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = native(tmp_path, "fixed", False)
    for config, complaint in (
        ({"query_expansion": {"strategy": "best", "length": 8}}, "query_expansion must be an object with a strategy"),
        ({"query_expansion": {"strategy": "min"}}, "query_expansion must have a length"),
        ({"document_length": 0}, "document_length must be a number of tokens of at least 1, got 0"),
    ):
        write(path, "sentence_bert_config.json", config)
        with pytest.raises(ValueError, match=complaint):
            _ = PoolingFiles.read(path).late_interaction
    write(path, "sentence_bert_config.json", {"query_expansion": {"strategy": "min", "length": 8, "token": "[no]"}})
    backend = PreTrainedTokenizerFast.from_pretrained(path).backend_tokenizer
    with pytest.raises(ValueError, match=r"the tokenizer has no token '\[no\]'"):
        token_marks(PoolingFiles.read(path), backend)


def bge_m3(path: Path) -> Path:
    """A checkpoint as BGE-M3 is published: a RoBERTa, and two linear layers in files of their own."""
    save("xlm-roberta", path, pad_token_id=0)
    tokenizer(path)
    write_modules(path, "Transformer", "Pooling", configs=[{"pooling_mode": "cls"}])
    torch.save({"weight": torch.randn(1, 48) / 7, "bias": torch.randn(1)}, path / "sparse_linear.pt")
    torch.save({"weight": torch.randn(48, 48) / 7, "bias": torch.randn(48)}, path / "colbert_linear.pt")
    return path


def test_one_checkpoint_gives_dense_sparse_and_multi_vectors(tmp_path: Path) -> None:
    path = bge_m3(tmp_path)
    pooler = load_pooling(path, dtype="float32")
    assert pooler.tasks == {PoolingTask.EMBED, PoolingTask.EMBED_TOKENS, PoolingTask.SPARSE}
    texts = [[2, 60, 61, 60, 3], [2, 70, 1, 3], [2, 80, 81, 82, 83, 84, 3]]
    auto: Any = AutoModel
    model = auto.from_pretrained(path).eval()
    sparse, multi = (torch.load(path / f"{name}_linear.pt") for name in ("sparse", "colbert"))
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in texts]
    unit = torch.nn.functional.normalize
    dense_vectors = unit(torch.stack([each[0] for each in states]), dim=-1).numpy()
    got, _ = pooler.run(PoolingContext.of(texts, PoolingTask.EMBED))
    np.testing.assert_allclose(got, dense_vectors, atol=1e-5)
    values, rows = pooler.run(PoolingContext.of(texts, PoolingTask.EMBED_TOKENS))
    assert rows.tolist() == [len(text) - 1 for text in texts]
    vectors = torch.cat([unit(each[1:] @ multi["weight"].T + multi["bias"], dim=-1) for each in states])
    np.testing.assert_allclose(values, vectors.numpy(), atol=1e-5)
    values, rows = pooler.run(PoolingContext.of(texts, PoolingTask.SPARSE))
    for pairs, text, each in zip(np.split(values, np.cumsum(rows)[:-1]), texts, states, strict=True):
        weights = torch.relu(each @ sparse["weight"].T + sparse["bias"])[:, 0].tolist()
        largest: dict[int, float] = {}
        for token, weight in zip(text, weights, strict=True):
            # [UNK] has no weight, as [CLS] and [SEP].
            if token > 3 and weight > largest.get(token, 0.0):
                largest[token] = weight
        assert {int(token): pytest.approx(weight, abs=1e-4) for token, weight in pairs} == largest


def test_files_of_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = bge_m3(tmp_path)
    files = PoolingFiles.read(path)
    head = VectorHead(VectorModules((), (), (), 48), frozenset())
    whole = (path / "sparse_linear.pt").read_bytes()
    for weight, bias, complaint in (
        ((1, 40), (1,), r"sparse_linear has a weight of \[1, 40\]"),
        ((2, 48), (2,), r"sparse_linear has a weight of \[2, 48\]"),
        ((), (1,), r"sparse_linear has a weight of \[\]"),
        ((1, 48), (3,), r"sparse_linear has a bias of \[3\], which does not fit its weight of \[1, 48\]"),
        ((1, 48), (), r"sparse_linear has a bias of \[\]"),
    ):
        torch.save({"weight": torch.randn(weight), "bias": torch.randn(bias)}, path / "sparse_linear.pt")
        with pytest.raises(ModelRefused, match=complaint):
            with_other_heads(head, files, VOCAB, torch.device("cpu"))
    # The first bytes of a pickle as torch wrote it once; a file of now that is cut off, and one of other things.
    for content in (b"no tensors", b"", b"\x80\x02", whole[:100], whole[:-100], pickle.dumps([1, 2])):
        (path / "sparse_linear.pt").write_bytes(content)
        with pytest.raises(ModelRefused, match=r"sparse_linear\.pt has no weight and bias"):
            with_other_heads(head, files, VOCAB, torch.device("cpu"))
    torch.save({"weight": torch.randn(1, 48), "bias": torch.randn(1)}, path / "sparse_linear.pt")
    torch.save({"weight": torch.randn(48), "bias": torch.randn(48)}, path / "colbert_linear.pt")
    with pytest.raises(ModelRefused, match=r"colbert_linear has a weight of \[48\]"):
        load_pooling(path)
