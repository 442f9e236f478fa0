"""A tokenizer of CLIP's class whose tokens are letters. It needs no torch."""

from __future__ import annotations

import string
from typing import Any


def tokenizer_of() -> Any:
    from transformers import CLIPTokenizer

    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in string.ascii_lowercase:
        for text in (letter, f"{letter}</w>"):
            vocabulary[text] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def second_tokenizer() -> Any:
    """A tokenizer in the place of T5's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: i for i, text in enumerate(["<pad>", "</s>", "<unk>", *string.ascii_lowercase])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
