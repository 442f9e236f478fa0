"""How a late-interaction checkpoint (ColBERT) wants queries and documents read, as its JSON files say.

Reads the forms of sentence-transformers (sentence_bert_config.json and the MultiVectorMask module), of PyLate
(config_sentence_transformers.json) and of Stanford's ColBERT (artifact.metadata). Knows no tokenizer.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The names of prompts that say what a text is.
QUERY = "query"
DOCUMENT = "document"
# Tokens of a query of the published ColBERT, where a checkpoint says nothing else.
_QUERY_TOKENS = 32
_PYLATE_KEYS = (
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "query_length",
    "document_length",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
)


@dataclass(frozen=True)
class Expansion:
    """Queries get tokens behind them until they have `length`. With `attend` others see these tokens, too.

    `fixed`: longer queries are too long. `token`: its name, or None for the tokenizer's mask token.
    """

    length: int
    attend: bool = False
    fixed: bool = True
    token: str | None = None


@dataclass(frozen=True)
class LateInteraction:
    """Lengths count all tokens; None where nothing is said. Tokens of `skipped` words in a text whose kind is one of
    `skipped_kinds` get no vector."""

    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    skipped: tuple[str, ...] = ()
    skipped_kinds: tuple[str, ...] = (DOCUMENT,)

    @property
    def longest(self) -> int:
        """The most tokens that texts of one kind or another have; 0 where nothing is said."""
        lengths = (self.query_length, self.document_length, None if self.expansion is None else self.expansion.length)
        return max((length for length in lengths if length is not None), default=0)

    def most_tokens(self, kind: str) -> int | None:
        """Return the most tokens of a text of this kind; None for no limit of its own."""
        if kind != QUERY:
            return self.document_length if kind == DOCUMENT else None
        if self.expansion is not None and self.expansion.fixed:
            return self.expansion.length
        return self.query_length


def late_interaction(
    transformer: Mapping[str, Any], mask: Mapping[str, Any], pylate: Mapping[str, Any], stanford: Mapping[str, Any]
) -> LateInteraction:
    """Return what the files say: sentence-transformers' own, PyLate's fields, and Stanford's (empty where there is no
    such file). ValueError names a field with an impossible value."""
    if stanford:
        expansion = Expansion(
            _positive(stanford, "query_maxlen") or _QUERY_TOKENS, bool(stanford.get("attend_to_mask_tokens"))
        )
        skipped = tuple(string.punctuation) if stanford.get("mask_punctuation", True) else ()
        return LateInteraction(None, _positive(stanford, "doc_maxlen"), expansion, skipped)
    own = {**pylate, **transformer}
    if mask.get("keep_only_token_ids"):
        raise ValueError("keep_only_token_ids keeps the tokens of images, and late interaction is of texts here")
    is_pylate = any(key in pylate for key in _PYLATE_KEYS)
    found = own.get("query_expansion")
    if found is not None:
        expansion_of_queries = _expansion(found)
    elif is_pylate and "query_expansion" not in own and pylate.get("do_query_expansion") is not False:
        attend = pylate.get("attend_to_expansion_tokens", pylate.get("attend_to_mask_tokens"))
        expansion_of_queries = Expansion(_positive(own, "query_length") or _QUERY_TOKENS, bool(attend))
    else:
        expansion_of_queries = None
    words = mask.get("skiplist_words", pylate.get("skiplist_words"))
    if words is None and is_pylate and not mask:
        words = list(string.punctuation)
    kinds = mask.get("skiplist_tasks") or [DOCUMENT]
    return LateInteraction(
        _positive(own, "query_length"),
        _positive(own, "document_length"),
        expansion_of_queries,
        _texts(words or [], "skiplist_words"),
        _texts([kinds] if isinstance(kinds, str) else kinds, "skiplist_tasks"),
    )


def _expansion(found: Any) -> Expansion:
    if not isinstance(found, dict) or found.get("strategy") not in ("fixed", "min"):
        raise ValueError(f"query_expansion must be an object with a strategy of fixed or min, got {found!r:.80}")
    length = _positive(found, "length")
    if length is None:
        raise ValueError("query_expansion must have a length, the tokens of a query after it")
    token = found.get("token")
    if token is not None and not isinstance(token, str):
        raise ValueError(f"the token of query_expansion must be a text, got {token!r:.80}")
    return Expansion(length, bool(found.get("attend")), found["strategy"] == "fixed", token)


def _texts(values: Any, name: str) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list of texts, got {values!r:.80}")
    return tuple(map(str, values))


def _positive(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a number of tokens of at least 1, got {value!r:.80}")
    return value
