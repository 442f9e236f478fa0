"""The tokenizer of a GGUF file in the form of transformers' tokenizers, which render chat templates."""

from __future__ import annotations

from typing import Any

from shared.gguf.file import open_gguf
from shared.gguf.tokenizer import tokenizer_of


def gguf_tokenizer(model: str) -> Any:
    """Return the tokenizer. Raise GgufError with what is wrong with the file, or OSError."""
    import transformers

    # Typed in parts only.
    make: Any = transformers.PreTrainedTokenizerFast
    found = tokenizer_of(open_gguf(model))
    post_processor = found.backend.post_processor
    tokenizer = make(
        tokenizer_object=found.backend,
        chat_template=found.chat_template,
        clean_up_tokenization_spaces=False,
        **found.special_tokens,
    )
    # transformers makes one of its own, which knows nothing of the file.
    tokenizer.backend_tokenizer.post_processor = post_processor
    return tokenizer
