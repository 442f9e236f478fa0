"""Tiny encoders and decoders of the families that embed, with wide random weights, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 151

_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "pad_token_id": 0,
}
_ROBERTA: dict[str, Any] = {**_BERT, "pad_token_id": 1, "max_position_embeddings": 202}
_DECODER: dict[str, Any] = {**_BERT, "num_key_value_heads": 2}

# Configurations, by a name of their own: the model type, and the values that give each its character.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    "roberta": ("roberta", _ROBERTA),
    "xlm-roberta": ("xlm-roberta", _ROBERTA),
    "camembert": ("camembert", _ROBERTA),
    "distilbert": (
        "distilbert",
        {"vocab_size": VOCAB, "dim": 48, "hidden_dim": 64, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 200},
    ),
    "electra": ("electra", {**_BERT, "embedding_size": 32}),
    "albert": ("albert", {**_BERT, "embedding_size": 32}),
    "ernie": ("ernie", _BERT),
    "modernbert": (
        "modernbert",
        {**_BERT, "local_attention": 8, "global_attn_every_n_layers": 3, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "eurobert": ("eurobert", _DECODER),
    "nomic_bert": ("nomic_bert", _BERT),
    "gte": ("gte", _BERT),
    "jina_embeddings_v3": ("jina_embeddings_v3", {**_BERT, "pad_token_id": 1}),
    "embeddinggemma": (
        "gemma3_text",
        {
            **_DECODER,
            "head_dim": 12,
            "use_bidirectional_attention": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {**_DECODER, "head_dim": 16}),
    "llama": ("llama", _DECODER),
    "mistral": ("mistral", {**_DECODER, "sliding_window": 7}),
    "gemma2": (
        "gemma2",
        {
            **_DECODER,
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mpnet": ("mpnet", _ROBERTA),
    "deberta-v2": (
        "deberta-v2",
        {**_BERT, "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]},
    ),
    "roformer": ("roformer", {**_BERT, "embedding_size": 48}),
    "t5": (
        "t5",
        {
            "vocab_size": VOCAB,
            "d_model": 48,
            "d_kv": 12,
            "d_ff": 64,
            "num_layers": 3,
            "num_heads": 4,
            "pad_token_id": 0,
        },
    ),
}

# Those whose attention does not go through transformers' registry.
PADDED = ("deberta-v2", "roformer", "t5")
# Those whose layers run in one compiled call on a CPU.
FUSED = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert",
    "electra",
    "ernie",
    "mpnet",
    "modernbert",
    "nomic_bert",
    "gte",
    "jina_embeddings_v3",
)
DECODERS = ("qwen3", "llama", "mistral", "gemma2", "embeddinggemma")


def save(name: str, path: Path, auto: Any = AutoModel, **overrides: Any) -> Path:
    """Save a new model of a configuration to `path`."""
    model_type, values = CONFIGS[name]
    config = AutoConfig.for_model(model_type, **{**values, **overrides})
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    widen(model)
    model.save_pretrained(path)
    return path


def widen(model: PreTrainedModel) -> None:
    """Draw weights wide, so that a wrong attention shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def save_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Save a tokenizer of words w4, w5..., with [CLS] and [SEP] around a text, as BERT has them."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{i}": i for i in range(4, VOCAB)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(path)
    return tokenizer


def random_texts(count: int, longest: int = 60, rng: np.random.Generator | None = None) -> list[NDArray[np.int32]]:
    """Draw texts of ordinary tokens."""
    rng = rng or np.random.default_rng()
    return [rng.integers(4, VOCAB, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


def write(path: Path, name: str, content: Any) -> None:
    """Write a JSON file, with its folder."""
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(json.dumps(content))


def write_modules(path: Path, *kinds: str, configs: Sequence[dict[str, Any]] = ()) -> None:
    """Write modules.json, and the config.json of each module behind the transformer."""
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    write(path, "modules.json", entries)
    for entry, config in zip(entries[1:], configs, strict=False):
        write(path, f"{entry['path']}/config.json", config)
