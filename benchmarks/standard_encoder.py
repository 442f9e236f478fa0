"""The encoder of the standard benchmarks: random float32 weights in the shape of all-MiniLM-L6-v2, and a tiny one.

The folder is one of sentence-transformers, so that every embedding server reads it. Each word of its vocabulary is one
token, so the number of a text's words decides its length. Speed is all that it is good for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from benchmarks.encoder_words import ENCODERS, LETTERS, LONGEST, SPECIAL, VOCABULARY, WORD_LETTERS

_FILES: Mapping[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "sentence_bert_config.json": {"max_seq_length": LONGEST, "do_lower_case": False},
}


def standard_encoder(directory: Path, size: str) -> Path:
    """Make the encoder in `directory`, unless it is there already."""
    if not (directory / "tokenizer.json").is_file():
        (directory / "1_Pooling").mkdir(parents=True, exist_ok=True)
        (directory / "2_Normalize").mkdir(exist_ok=True)
        for name, content in _FILES.items():
            (directory / name).write_text(json.dumps(content))
        shape = ENCODERS[size]
        pooling = {"word_embedding_dimension": shape["hidden_size"], "pooling_mode_mean_tokens": True}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        _save_weights(directory, shape)
        _save_tokenizer(directory)
    return directory


def _save_weights(directory: Path, shape: Mapping[str, int]) -> None:
    config = AutoConfig.for_model("bert", **shape, vocab_size=VOCABULARY, max_position_embeddings=LONGEST)
    auto: Any = AutoModel
    torch.manual_seed(22)
    auto.from_config(config, dtype=torch.float32).save_pretrained(directory)


def _save_tokenizer(directory: Path) -> None:
    made = ("".join(letters) for letters in itertools.product(LETTERS, repeat=WORD_LETTERS))
    entries = itertools.islice(itertools.chain(SPECIAL, made), VOCABULARY)
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    around = [(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    fast: Any = PreTrainedTokenizerFast
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    fast(tokenizer_object=tokenizer, **names, model_max_length=LONGEST).save_pretrained(directory)
    config = directory / "tokenizer_config.json"
    # Servers with an older transformers do not know the class that this one writes.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
