"""What a tekken.json says beside its tokens: which of them begin and end a text.

transformers converts the tokens of such a file, and leaves this out. Mistral's own library puts the first token before
every text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.json_files import read_json_file

# Names of Mistral's control tokens, by transformers' names of their parts.
_CONTROL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def add_control_tokens(tokenizer: Any, path: Path) -> None:
    """Give a tokenizer that was converted from the tekken.json at `path` the control tokens of that file."""
    from tokenizers.processors import TemplateProcessing

    file = read_json_file(path)
    named = {entry["token_str"] for entry in file.get("special_tokens") or () if entry.get("is_control", True)}
    known = tokenizer.get_vocab()
    for part, token in _CONTROL.items():
        if token in named and token in known and getattr(tokenizer, part, None) is None:
            setattr(tokenizer, part, token)
    begin = _CONTROL["bos_token"]
    if tokenizer.bos_token == begin:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, known[begin])]
        )
