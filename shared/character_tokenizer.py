"""A tokenizer of single characters on the tokenizers library, for models whose vocabulary is a list of letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def character_tokenizer(vocabulary: Mapping[str, int]) -> Any:
    """Return a tokenizer in the form of transformers'. Characters that the vocabulary lacks become `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Typed in parts only.
    make: Any = PreTrainedTokenizerFast
    unknown = "<unk>"
    known = dict(vocabulary)
    known.setdefault(unknown, max(known.values()) + 1)
    backend = Tokenizer(models.WordLevel(known, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return make(tokenizer_object=backend, unk_token=unknown)
