"""Compiles constraints within this process, for offline use, where the user bears the cost of the constraint.

A server asks `compiler.py` instead, which runs it with limits on time and memory.
"""

from __future__ import annotations

import asyncio
import json
from functools import cached_property

from api_server.constraints.compile_process import outcome, special_tokens
from api_server.constraints.compiler import check_size, refused
from api_server.text.tokenizer import Tokenizer
from interfaces import Constraint
from shared.grammar import Vocabulary


class LocalCompiler:
    """Compiles constraints. Loads the tokens with the first one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def compile(self, constraint: Constraint) -> str:
        """The compiled grammar. Raises RequestFailed(INVALID)."""
        check_size(constraint)
        found = await asyncio.to_thread(self._outcome, constraint)
        if "grammar" not in found:
            raise refused(constraint, found["error"])
        return found["grammar"]

    def _outcome(self, constraint: Constraint) -> dict[str, str]:
        vocabulary, special = self._loaded
        return outcome(vocabulary, special, constraint.kind, constraint.source)

    @cached_property
    def _loaded(self) -> tuple[Vocabulary, dict[str, int]]:
        tokenizer, eos = self._tokenizer.grammar_vocabulary()
        vocabulary = Vocabulary(tokenizer, eos)
        return vocabulary, special_tokens(json.loads(tokenizer), vocabulary)
