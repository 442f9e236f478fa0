"""The tokens that the grammars of constrained rows allow next: the worker's side of `mask_process.py`.

Masks are made while the worker does something else: a row's first one while its prompt is computed, the next ones from
the moment its token is known until the next step samples. If the process dies, another one takes its place within
milliseconds and gets all rows again; the row that killed it fails, and no other one notices. Knows rows, tokens and
logits; no grammar.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from select import select
from typing import Any

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import GrammarState, RowGrammar
from model_worker.grammar.apply_mask import apply_masks
from model_worker.grammar.mask_process import CPU_SECONDS, HEADER_BYTES, NO_ROW
from model_worker.sampling.draw_records import RowMasks
from shared.forkserver import ForkServer
from shared.pipe_messages import message_unpacker

log = logging.getLogger(__name__)

WORD_BYTES = 4
# A process that is silent for so many seconds is killed, whether it computes or waits for something.
STALL_SECONDS = 300.0
# Seconds from the end of a process's output to its own end.
DYING_SECONDS = 5.0
# Most deaths in a row without a row to blame: then something else is wrong, and the worker ends.
MOST_DEATHS = 3


@dataclass
class _Row:
    """The parts from which the row's matcher can be built again."""

    grammar: str
    state: GrammarState
    ends: list[int]
    tokens: list[int]
    # Whether jump-forward tokens may come at once, or one by one, because each needs a report of its own.
    jumps: bool
    # The request that announced the row; answers before it with the same number are about another row.
    since: int = 0

    def join(self, row: int) -> list[Any]:
        return [row, self.grammar, dataclasses.asdict(self.state), self.ends, self.tokens]


class Masks:
    """Masks of up to `max_rows` rows over `vocab_size` tokens, which a process of the fork server fills."""

    def __init__(
        self, fork_server: ForkServer, max_rows: int, vocab_size: int, jumps: bool = True, has_kernels: bool = True
    ) -> None:
        """Take the fork server. Without `jumps` tokens that a grammar forces are sampled one by one, too."""
        self._fork_server = fork_server
        self._jumps = jumps
        self._has_kernels = has_kernels
        self._vocab_size = vocab_size
        words = -(-vocab_size // (8 * WORD_BYTES))
        self._memory = os.memfd_create("masks")
        os.ftruncate(self._memory, HEADER_BYTES + max_rows * words * WORD_BYTES)
        shared = mmap.mmap(self._memory, 0)
        self._header = np.frombuffer(shared, np.int32, HEADER_BYTES // WORD_BYTES)
        self._masks = np.frombuffer(shared, np.int32, offset=HEADER_BYTES).reshape(max_rows, words)
        self._rows: dict[int, _Row] = {}
        self._errors: dict[int, str] = {}
        self._forced: dict[int, list[int]] = {}
        self._channel: socket.socket | None = None
        self._unpacker = message_unpacker()
        self._sent = self._answered = 0
        self._deaths = 0
        self._spared = NO_ROW
        self._drops: list[int] = []
        self._joins: list[int] = []

    def start(self) -> None:
        """Begin to load the tokens, which takes seconds of another core. The first row does so, too."""
        self._fork_server.start()

    def close(self) -> None:
        """End the process."""
        self._hang_up()
        self._fork_server.close()

    def _hang_up(self) -> None:
        process = self._channel
        self._channel = None
        if process is not None:
            process.close()

    def drop(self, row: int) -> None:
        """Free `row`; one that is not constrained stays so."""
        self._errors.pop(row, None)
        self._forced.pop(row, None)
        if self._rows.pop(row, None) is not None:
            self._drops.append(row)

    def join(self, row: int, grammar: RowGrammar, emitted: NDArray[np.int32], jumps: bool = True) -> None:
        """Constrain `row` from now on; `emitted` are the tokens of its answer so far.

        With `jumps` the tokens that its grammar forces may come together.
        """
        self._rows[row] = _Row(grammar.text, grammar.state, grammar.ends, emitted.tolist(), jumps and self._jumps)
        self._joins.append(row)

    def flush(self) -> None:
        """Send all changes; the masks of new rows are made from here on."""
        if self._joins or self._drops:
            self._request([])

    def constrain(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which of these rows have a grammar."""
        if not self._rows:
            return np.zeros(len(rows), np.bool_)
        return np.isin(rows, list(self._rows))

    def apply(self, logits: torch.Tensor, rows: NDArray[np.int32]) -> dict[int, str]:
        """Put -inf on forbidden tokens, in place; `logits[i]` belongs to `rows[i]`. Returns failed rows and why."""
        masks, failed = self.of(rows)
        if masks is not None:
            apply_masks(logits[:, : self._vocab_size], *masks, self._has_kernels)
        return failed

    def of(self, rows: NDArray[np.int32]) -> tuple[RowMasks | None, dict[int, str]]:
        """Wait for the masks of those of the rows that have a grammar. Returns them, and failed rows and why."""
        index = [i for i, row in enumerate(rows.tolist()) if row in self._rows]
        if not index:
            return None, {}
        self._wait()
        failed = {row: self._errors[row] for row in rows[index].tolist() if row in self._errors}
        live = np.array([i for i in index if int(rows[i]) not in failed], np.int64)
        return RowMasks(live, self._masks[rows[live]]) if len(live) else None, failed

    def sampled(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> dict[int, list[int]]:
        """Advance the constrained ones among these rows by a token each; their next masks are made from here on.

        Returns the jump-forward tokens by row: they count as sampled, too.
        """
        pairs: list[tuple[int, list[int]]] = []
        jumped: dict[int, list[int]] = {}
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            found = self._rows.get(row)
            if found is None or row in self._errors:
                continue
            run = [token]
            more = self._forced.pop(row, [])
            if more[:1] == run and found.jumps:
                run = more
                jumped[row] = more[1:]
            found.tokens += run
            pairs.append((row, run))
        if pairs:
            self._request(pairs)
        return jumped

    def _request(self, tokens: Sequence[tuple[int, list[int]]]) -> None:
        joins = [row for row in dict.fromkeys(self._joins) if row in self._rows]
        drops = self._drops
        self._drops = []
        self._joins = []
        if self._channel is None:
            self._spawn()
        else:
            self._send(drops, joins, tokens)

    def _send(self, drops: list[int], joins: list[int], tokens: Sequence[tuple[int, list[int]]]) -> None:
        self._sent += 1
        for row in joins:
            self._rows[row].since = self._sent
        request = [self._sent, drops, [self._rows[row].join(row) for row in joins], tokens]
        assert self._channel is not None
        with contextlib.suppress(OSError):  # the wait for the answer finds out
            self._channel.sendall(msgpack.packb(request))

    def _wait(self) -> None:
        """Wait until every request is answered."""
        while self._answered < self._sent:
            started = time.monotonic()
            if not self._hear(STALL_SECONDS):
                self._restart(stalled=time.monotonic() - started >= STALL_SECONDS)

    def _hear(self, seconds: float) -> bool:
        """Take an answer of the process; False when there is none, because it has died or is silent for too long."""
        assert self._channel is not None
        readable, _, _ = select([self._channel], [], [], seconds)
        try:
            data = self._channel.recv(1 << 16) if readable else b""
        except ConnectionResetError:  # it died before it had read everything
            data = b""
        self._unpacker.feed(data)
        for number, errors, forced in self._unpacker:
            self._answered = number
            self._deaths = 0
            self._spared = NO_ROW
            current = {row for row in (*errors, *forced) if row in self._rows and self._rows[row].since <= number}
            self._errors |= {row: text for row, text in errors.items() if row in current}
            self._forced |= {row: tokens for row, tokens in forced.items() if row in current}
        return data != b""

    def _restart(self, stalled: bool) -> None:
        """Start another process, without the row that the last one died of.

        A SIGKILL comes from outside (an operator, or the kernel out of memory): its row is tried once more.
        """
        row = int(self._header[0])
        guilty = stalled or self._fork_server.exit_code(DYING_SECONDS) != -signal.SIGKILL
        self._deaths += 1
        if row in self._rows and (guilty or row == self._spared):
            self._errors[row] = f"its grammar takes too much memory, or more than {CPU_SECONDS:g} s, for one token"
        elif self._deaths > MOST_DEATHS:
            raise RuntimeError(f"the process that fills masks died {self._deaths} times; its own words are above")
        self._spared = row
        self._hang_up()
        if stalled:
            self._fork_server.close()
        log.warning("the process that fills masks %s at row %d", "stalled" if stalled else "died", row)
        self._spawn()

    def _spawn(self) -> None:
        """Start a fresh process, and send it all rows that live."""
        self._header[0] = NO_ROW
        self._unpacker = message_unpacker()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._fork_server.fork([theirs.fileno(), self._memory])
        joins = [row for row in self._rows if row not in self._errors]
        if joins:
            self._send([], joins, [])
        else:
            self._answered = self._sent
