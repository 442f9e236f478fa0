"""Asks the compiler's own code, within the test process, what a constraint allows; tokens are the embedded model's."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from api_server.constraints.compile_process import checked, special_tokens
from api_server.constraints.languages import translate
from deploy import embedded_model
from shared.grammar import GrammarError, Vocabulary, has_bit

EOS = 0


@functools.cache
def loaded() -> tuple[Vocabulary, dict[str, int]]:
    text = (Path(embedded_model.__file__).parent / "weights" / "tokenizer.json").read_text()
    vocabulary = Vocabulary(text, [EOS])
    return vocabulary, special_tokens(json.loads(text), vocabulary)


def compiled(kind: str, source: Any) -> str:
    """Raises GrammarError."""
    vocabulary, special = loaded()
    grammar, _ = translate(kind, source if isinstance(source, str) else json.dumps(source), special)
    return checked(vocabulary, grammar)


def allows(grammar: str, text: str) -> bool:
    """Whether a compiled grammar allows exactly this text."""
    vocabulary, _ = loaded()
    matcher = vocabulary.matcher(grammar)
    mask = np.zeros(vocabulary.words, np.int32)
    try:
        for token in vocabulary.tokenize(text):
            matcher.consume(token)
        matcher.fill(mask, [EOS])
    except GrammarError:
        return False
    return has_bit(mask, EOS)
