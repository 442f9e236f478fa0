"""`python -m model_worker.grammar.mask_process`: fills the masks of constrained rows, beside the worker that samples.

A process of its own, because a grammar may take any time and memory: a row that takes too much ends the process, and
the worker gets another without that row at once, because both are forked from one that has loaded the tokens
(shared/forkserver.py). Reads requests from a socket, answers there, and writes masks into memory that it shares with
the worker. Knows rows and tokens; knows no logits.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from interfaces import GrammarState
from shared.forkserver import ForkServer, serve_forks
from shared.grammar import GrammarError, Matcher, Vocabulary, set_bits
from shared.liveness import become, limit_memory
from shared.pipe_messages import message_unpacker
from shared.tokenizer_files import load_tokenizer

# Bytes before the masks: the row being worked on, so that the worker knows whose work ended this process.
HEADER_BYTES = 64
NO_ROW = -1
# Processor time that one row may take at once.
CPU_SECONDS = 2.0
SPARE_SECONDS = 2.0
# Processor time that a row may take in all: CPU_SECONDS, and so much for each of its tokens. All rows wait for it.
SECONDS_PER_TOKEN = 0.02
# Memory of all grammars of a worker.
MEMORY_BYTES = 4 << 30
CACHED_GRAMMARS = 128


@dataclass
class _Row:
    matcher: Matcher
    state: GrammarState
    ends: list[int]
    # The jump-forward tokens. Kept until they have come, so that the same tokens follow whether they come at once, one
    # by one, or in a replay.
    forced: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def spend(self, seconds: float) -> None:
        """Count processor time. Raises GrammarError when the row has taken more than its share."""
        self.seconds += seconds
        if self.seconds > SPARE_SECONDS + SECONDS_PER_TOKEN * self.tokens:
            raise GrammarError(f"it takes more than {SECONDS_PER_TOKEN * 1000:g} ms of processor time for each token")

    def look_ahead(self) -> None:
        """Find the jump-forward tokens, unless more of them are to come."""
        if not self.forced and self.state.grammar_enforced:
            self.forced = self.matcher.forced(self.ends)

    def consume(self, token: int) -> None:
        self.tokens += 1
        if token in self.ends:
            return
        if self.state.update(token, has_grammar=True):
            self.matcher.consume(token)
        self.forced = self.forced[1:] if self.forced[:1] == [token] else []
        self.look_ahead()

    def fill(self, mask: NDArray[np.int32]) -> None:
        if self.forced:
            mask[:] = 0
            set_bits(mask, self.forced[:1], True)
        elif self.state.grammar_enforced:
            self.matcher.fill(mask, self.ends)
        else:
            # What comes before the constrained part is free, but it is not the answer: it may not end there.
            mask[:] = -1
            set_bits(mask, self.ends, False)


class Masks:
    """The constrained rows; `header` and `masks` are shared with the worker."""

    def __init__(self, vocabulary: Vocabulary, header: NDArray[np.int32], masks: NDArray[np.int32]) -> None:
        self._vocabulary = vocabulary
        self._header = header
        self._masks = masks
        self._scratch = np.zeros(vocabulary.words, np.int32)
        self._rows: dict[int, _Row] = {}
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()

    def serve(
        self, drops: Sequence[int], joins: Sequence[Any], tokens: Sequence[Any]
    ) -> tuple[dict[int, str], dict[int, list[int]]]:
        """Remove rows, add rows, and advance rows by some tokens each; then fill the masks of added and advanced ones.

        Returns errors by row, and jump-forward tokens by row, where there is more than one.
        """
        errors: dict[int, str] = {}
        for row in drops:
            self._rows.pop(row, None)
        for row, *form in joins:
            self._guarded(row, errors, lambda row=row, form=form: self._join(row, *form))
        for row, some in tokens:
            self._guarded(row, errors, lambda row=row, some=some: self._go_on(row, some))
        touched = [row for row, *_ in (*joins, *tokens) if row in self._rows]
        return errors, {row: self._rows[row].forced for row in touched if len(self._rows[row].forced) > 1}

    def _guarded(self, row: int, errors: dict[int, str], work: Any) -> None:
        self._header[0] = row
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends the process: nothing else ends a matcher's work
        try:
            work()
        except GrammarError as error:
            self._rows.pop(row, None)
            errors[row] = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._header[0] = NO_ROW

    def _join(self, row: int, grammar: str, state: dict[str, Any], ends: list[int], emitted: list[int]) -> None:
        joined = _Row(self._matcher(grammar), GrammarState(**state), ends)
        if not joined.state.waits_for_region:
            joined.state.grammar_enforced = True
        started = time.process_time()
        joined.look_ahead()
        for token in emitted:
            joined.consume(token)
        self._rows[row] = joined
        self._fill(row, joined, started)

    def _go_on(self, row: int, tokens: list[int]) -> None:
        # A row that failed is gone here a step before the worker reads its error.
        found = self._rows.get(row)
        if found is not None:
            started = time.process_time()
            for token in tokens:
                found.consume(token)
            self._fill(row, found, started)

    def _fill(self, row: int, found: _Row, started: float) -> None:
        # The model may know fewer tokens than its tokenizer, or have room for more.
        found.fill(self._scratch)
        width = min(len(self._scratch), self._masks.shape[1])
        self._masks[row, :width] = self._scratch[:width]
        self._masks[row, width:] = 0
        found.spend(time.process_time() - started)

    def _matcher(self, grammar: str) -> Matcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._vocabulary.matcher(grammar)
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].copy()


def fork_server(model: str, max_rows: int) -> ForkServer:
    """Make the fork server of a Hugging Face directory or hub name. Its start takes seconds."""
    return ForkServer(["-m", "model_worker.grammar.mask_process", "--model", model, "--rows", str(max_rows)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model_worker.grammar.mask_process", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    become("mask_process")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker says when it is over
    vocabulary = load(arguments.model)
    serve_forks(lambda descriptors: _serve(vocabulary, arguments.rows, *descriptors))


def _serve(vocabulary: Vocabulary, max_rows: int, requests: int, memory: int) -> None:
    """Serve until the worker closes its end of the socket `requests`."""
    shared = mmap.mmap(memory, os.fstat(memory).st_size)
    header = np.frombuffer(shared, np.int32, HEADER_BYTES // 4)
    stride = (len(shared) - HEADER_BYTES) // max_rows // 4
    masks = np.frombuffer(shared, np.int32, offset=HEADER_BYTES).reshape(max_rows, stride)
    limit_memory(MEMORY_BYTES)
    rows = Masks(vocabulary, header, masks)
    unpacker = message_unpacker()
    with socket.socket(fileno=requests) as worker, contextlib.suppress(ConnectionError):
        while data := worker.recv(1 << 20):
            unpacker.feed(data)
            for number, *request in unpacker:
                worker.sendall(msgpack.packb([number, *rows.serve(*request)]))


def load(model: str) -> Vocabulary:
    """Load the tokens of a Hugging Face directory or hub name."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # a third of the time that transformers takes
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    tokenizer = load_tokenizer(model)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Vocabulary(tokenizer.backend_tokenizer.to_str(), eos)


if __name__ == "__main__":
    main()
