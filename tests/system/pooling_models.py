"""Tiny random models that pool, with a tokenizer: an encoder for vectors, and a cross-encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from tests.api_server.pooling.conftest import PROMPTS, save_tokenizer

LONGEST = 128
WIDTH = 32


def config(folder: Path, **values: Any) -> BertConfig:
    save_tokenizer(folder, LONGEST)
    return BertConfig(
        vocab_size=len(PreTrainedTokenizerFast.from_pretrained(folder)),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
        initializer_range=0.5,
        **values,
    )


def make_embedder(folder: Path) -> Path:
    """An encoder whose vectors are the means of its states, with prompts for queries and documents."""
    torch.manual_seed(7)
    BertModel(config(folder)).save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    facts = {"model_type": "SentenceTransformer", "prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(facts))
    return folder


def make_reranker(folder: Path) -> Path:
    torch.manual_seed(8)
    BertForSequenceClassification(config(folder, num_labels=1)).save_pretrained(folder)
    return folder
