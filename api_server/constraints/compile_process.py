"""`python -m api_server.constraints.compile_process`: compiles constraints beside the API process.

Each constraint is compiled in a child of its own, forked from this small process that has loaded the tokens. Limits on
processor time and memory apply to the child, and exceeding them kills only the child. Reads requests from standard
input (the first is the tokenizer), and writes answers to standard output in the order of completion.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from api_server.constraints.languages import translate
from shared.grammar import GrammarError, Vocabulary
from shared.limited_children import FAILED, LimitedChildren, Limits
from shared.liveness import become
from shared.pipe_messages import message_unpacker

CPU_SECONDS = 1.0
# Limit for a child that waits instead of computing.
WALL_SECONDS = 60.0
# Memory of a child beyond that of this process.
MEMORY_BYTES = 1 << 30
# Constraints compiled at once.
CHILDREN = 4
# Most places of a schema in one line of the log.
MOST_LISTED = 8
# Compilation yields to token generation.
NICENESS = 10

_DRAWING = re.compile(r"\s*(\d+ \|.*|\^+)$")
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")

_TOO_SLOW = f"it takes more than {CPU_SECONDS:g} s of processor time to compile"
_TOO_LARGE = f"it takes more than {MEMORY_BYTES >> 20} MB of memory to compile"


class Compiler:
    """Compiles the constraints that arrive; `run` ends when the API process closes its end."""

    def __init__(self, vocabulary: Vocabulary, special: dict[str, int], answers: Any) -> None:
        self._vocabulary = vocabulary
        self._special = special
        self._answers = answers

    def run(self, requests: int, unpacker: msgpack.Unpacker) -> None:
        limits = Limits(
            cpu_seconds=CPU_SECONDS,
            wall_seconds=WALL_SECONDS,
            memory_bytes=MEMORY_BYTES,
            niceness=NICENESS,
            at_once=CHILDREN,
        )
        LimitedChildren(limits, self._compile, self._answer).run(requests, unpacker)

    def _compile(self, request: list[Any]) -> dict[str, str]:
        _, kind, source = request
        return outcome(self._vocabulary, self._special, kind, source)

    def _answer(self, request: list[Any], result: dict[str, str] | None, exit_code: int) -> None:
        answer = {"error": _why(exit_code)} if result is None else result
        self._answers.write(msgpack.packb([request[0], answer]))
        self._answers.flush()


def outcome(vocabulary: Vocabulary, special: Mapping[str, int], kind: str, source: str) -> dict[str, str]:
    """The compiled `grammar`, or the `error`; `special` are the tokens that stand for no text.

    `ignored` lists the parts of a schema that change nothing.
    """
    try:
        grammar, ignored = translate(kind, source, special)
        said = {"ignored": _listed(ignored)} if ignored else {}
        return {"grammar": checked(vocabulary, grammar)} | said
    except GrammarError as error:
        return {"error": readable(str(error))}
    except MemoryError:
        return {"error": _TOO_LARGE}
    except UnicodeEncodeError:
        return {"error": "it has half of a surrogate pair, which is no character"}
    except RecursionError:
        return {"error": "it is nested too deeply"}


def _listed(places: list[str]) -> str:
    """Places for the log: a few are enough to find the rest."""
    more = f" and {len(places) - MOST_LISTED} more" if len(places) > MOST_LISTED else ""
    return ", ".join(places[:MOST_LISTED]) + more


def checked(vocabulary: Vocabulary, grammar: str) -> str:
    """The grammar, after a check that it can be enforced from its first token on. Raises GrammarError."""
    matcher = vocabulary.matcher(grammar)
    matcher.fill(np.zeros(vocabulary.words, np.int32), ends=[0])
    return grammar


def readable(text: str) -> str:
    """The matcher's message without its drawing of the place, which is in a grammar that the client has not seen."""
    if text.startswith("NoExtension"):
        return "no text can match it"
    if "oneOf constraints" in text:
        return "oneOf is supported where its branches exclude each other by type or by a constant property, not here"
    lines = [line for line in text.splitlines() if line.strip()]
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    words = found or [line.strip() for line in lines if not _DRAWING.match(line)]
    return _PLACE.sub("", "; ".join(words))[:1000]


def _why(number: int) -> str:
    """Why a child has ended with this exit code."""
    if number == FAILED:
        return "the compiler failed on it"
    return _TOO_SLOW if number in (-signal.SIGPROF, -signal.SIGKILL) else _TOO_LARGE


def special_tokens(tokenizer: dict[str, Any], vocabulary: Vocabulary) -> dict[str, int]:
    """Tokens of a tokenizer.json, by their text, that stand for no text in a grammar."""
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return {text: token for text, token in added.items() if vocabulary.is_special(token)}


def main() -> None:
    become("compile_process")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process ends this one
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's prints must not mix with answers
    unpacker = message_unpacker()
    requests = sys.stdin.fileno()
    for tokenizer, eos in _first(requests, unpacker):
        vocabulary = Vocabulary(tokenizer, eos)
        Compiler(vocabulary, special_tokens(json.loads(tokenizer), vocabulary), answers).run(requests, unpacker)


def _first(requests: int, unpacker: msgpack.Unpacker) -> list[Any]:
    """The first request; empty if there is none."""
    while data := os.read(requests, 1 << 20):
        unpacker.feed(data)
        for request in unpacker:
            return [request]
    return []


if __name__ == "__main__":
    main()
