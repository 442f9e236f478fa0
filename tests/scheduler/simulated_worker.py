"""A worker whose K/V cache holds the token ids themselves, so that every read of a wrong or stale block is seen.

Its next token is a hash of all tokens before it: any naive loop can say what a request must produce.
"""

from __future__ import annotations

import random
import zlib

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    Join,
    KvMoved,
    KvPiece,
    KvTaken,
    ShipKv,
    Step,
    StepResult,
    TakeKv,
    TokenRuns,
    WorkerHello,
    decode,
    encode,
    mapped,
)

VOCAB = 997
EMPTY = -7
WRONG = -8


def next_token(tokens: list[int], seed: int) -> int:
    return zlib.crc32(np.array([seed, *tokens], np.int64).tobytes()) % VOCAB


def naive_generate(prompt: list[int], seed: int, stop_ids: list[int], limit: int) -> list[int]:
    """Output tokens, the stop token included."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class SimulatedWorker:
    def __init__(
        self,
        index: int,
        epoch: int,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        spill_slots: int = 0,
    ):
        self.hello = WorkerHello(
            device="test",
            index=index,
            epoch=epoch,
            pid=0,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            architecture="simulated",
            dtype="float32",
            attention="none",
            guesses=True,
            spill_slots=spill_slots,
            spill_place="the test's disk",
            kv_form="simulated",
            block_bytes=8 * block_size,
        )
        # Share of pieces that are lost.
        self.losing = 0.0
        self.moves = Moves(self, spill_slots)
        self.memory = np.full((num_blocks, block_size), EMPTY, np.int64)
        self.tables: dict[int, dict[int, int]] = {}
        self.joins: dict[int, Join] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.most_tokens = 0
        self._random = random.Random(index)

    def run(self, sent: Step) -> StepResult:
        step = decode(encode(sent))
        assert isinstance(step, Step)
        self.moves.order(step)
        for row in step.drop.tolist():
            del self.joins[row], self.tokens[row], self.computed[row], self.tables[row]
        for join in step.joins:
            assert join.row not in self.joins, "a row joins that was not dropped"
            self.joins[join.row] = join
            self.tokens[join.row] = join.tokens.tolist()
            self.computed[join.row] = join.start
            self.tables[join.row] = {}
        for row, index, block in step.new_blocks.tolist():
            assert index not in self.tables[row], "a block index is given twice"
            self.tables[row][index] = block
        ntok = np.ones(len(step.rows), np.int32) if step.ntok is None else step.ntok
        self.most_tokens = max(self.most_tokens, int(ntok.sum()))
        pairs = [self._compute(row, count) for row, count in zip(step.rows.tolist(), ntok.tolist(), strict=True)]
        sampled = [pair for pair in pairs if pair is not None]
        granted = [] if step.ahead is None else zip(step.rows.tolist(), step.ahead.tolist(), strict=True)
        guessed = {row: self._guess(row, ahead) for row, ahead in granted}
        right = {row: run for row, run in guessed.items() if run}
        return StepResult(
            incarnation=step.incarnation,
            epoch=step.epoch,
            index=self.hello.index,
            step=step.step,
            rows=_column([row for row, _ in sampled]),
            tokens=_column([token for _, token in sampled]),
            logprobs=None,
            errors={},
            device_us=1,
            more=TokenRuns.of(right) if right else None,
        )

    def ship(self, sent: ShipKv | TakeKv) -> KvPiece | KvTaken:
        """Send blocks, or fill them."""
        order = decode(encode(sent))
        whose = order.incarnation, order.epoch, self.hello.index, order.ticket
        lost = self._random.random() < self.losing
        if isinstance(order, ShipKv):
            data = self.memory[order.blocks].reshape(-1).view(np.uint8)
            return KvPiece(*whose, np.empty(0, np.uint8) if lost else data)
        if not lost:
            self.memory[order.blocks] = mapped(order.data).view(np.int64).reshape(len(order.blocks), -1)
        return KvTaken(*whose, not lost)

    def _compute(self, row: int, count: int) -> tuple[int, int] | None:
        tokens, table, size = self.tokens[row], self.tables[row], self.hello.block_size
        start = self.computed[row]
        assert 0 < count <= len(tokens) - start, "a row computes tokens that it does not have"
        for position in range(start, start + count):
            self.memory[table[position // size], position % size] = tokens[position]
        self.computed[row] = start + count
        cached = [int(self.memory[table[p // size], p % size]) for p in range(start + count)]
        assert cached == tokens[: start + count], "the blocks of a row do not hold its tokens"
        if start + count < len(tokens):
            return None
        tokens.append(next_token(cached, self.joins[row].sampling.seed))
        return row, tokens[-1]

    def _guess(self, row: int, ahead: int) -> list[int]:
        """What follows in a row, as far as it was guessed right; behind it the guesses that were wrong."""
        right = self._random.randint(0, ahead)
        more = [pair[1] for pair in (self._compute(row, 1) for _ in range(right)) if pair is not None]
        table = self.tables[row]
        size = self.hello.block_size
        for position in range(self.computed[row], self.computed[row] + ahead - right):
            self.memory[table[position // size], position % size] = WRONG
        return more


class Moves:
    """Saves and loads blocks as a worker's thread does: in the order of the steps, and some time after them."""

    def __init__(self, worker: SimulatedWorker, slots: int) -> None:
        self.worker = worker
        self.slots: list[NDArray[np.int64] | None] = [None] * slots
        # Share of moves that fail.
        self.failing = 0.0
        # Slots behind this one cannot be written.
        self.room = slots
        self.pending: list[tuple[int, list[tuple[int, NDArray[np.int64] | int | None]]]] = []
        self.step: Step | None = None
        self._random = random.Random(worker.hello.index)

    def order(self, step: Step) -> None:
        self.step = step
        for block, slot, _ in [] if step.save is None else step.save.tolist():
            skipped = self._random.random() < self.failing
            self.pending.append((0, [(slot, None if skipped else self.worker.memory[block].copy())]))
        for ticket, slot, block in [] if step.load is None else step.load.tolist():
            if self.pending and self.pending[-1][0] == ticket:
                self.pending[-1][1].append((slot, block))
            else:
                self.pending.append((ticket, [(slot, block)]))

    def move(self, most: int) -> KvMoved | None:
        """Carry out the next orders, `most` at most; None if there is nothing to say."""
        step = self.step
        done, self.pending = self.pending[:most], self.pending[most:]
        loads: list[tuple[int, int]] = []
        skipped: list[int] = []
        broken: list[int] = []
        full = False
        for ticket, parts in done:
            count = 0
            for slot, content in parts:
                fails = self._random.random() < self.failing
                if isinstance(content, int):
                    kept = self.slots[slot]
                    if kept is None or fails:
                        broken += [slot] if fails else []
                        break
                    self.worker.memory[content] = kept
                    count += 1
                elif content is None or fails or slot >= self.room:
                    (skipped if content is None else broken).append(slot)
                    full |= slot >= self.room
                    self.slots[slot] = None
                else:
                    self.slots[slot] = content
            if ticket:
                loads.append((ticket, count))
        if step is None or not (loads or skipped or broken):
            return None
        tickets, blocks = zip(*loads, strict=True) if loads else ((), ())
        return KvMoved(
            step.incarnation,
            step.epoch,
            self.worker.hello.index,
            _column(list(tickets)),
            _column(list(blocks)),
            np.full(len(loads), 0.001, np.float32),
            _column(skipped),
            _column(broken),
            full,
        )


def _column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)
