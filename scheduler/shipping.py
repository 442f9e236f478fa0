"""Workers that leave: their sequences go to others, with the K and V that they have.

A worker that is asked to end says so and computes no more. When its steps in flight are answered, its sequences return
to the queue, and are placed as any others; where it pays, their blocks follow them, piece by piece: the scheduler asks
the worker that leaves for the bytes, and passes them on to the one that has the row. On one machine the bytes lie in
shared memory, and only their name passes here. What does not come is computed: a worker that dies on the way, on either
end, costs no more than one that dies at any time. Knows workers, rows and blocks. Does not know sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from interfaces import GENERATE, Dismissal, KvPiece, KvTaken, Shareable, SharedMemoryArray, ShipKv, Stage, TakeKv
from scheduler.arrivals import Arrival
from scheduler.open_requests import OpenRequests
from scheduler.workers import Worker

# Bytes of a piece, but one block at least, and pieces of one worker that may be under way: what is in memory twice.
PIECE_BYTES = 4 << 20
MOST_PIECES = 2

ToOthers = ShipKv | TakeKv | Dismissal


@dataclass(eq=False, slots=True)
class _Piece:
    arrival: Arrival
    source: Worker
    target: Worker
    # Where they are in `Arrival.blocks`.
    first: int
    count: int
    sent: float
    # Whether its bytes are on their way to the target.
    taking: bool = False


class Shipping:
    """The pieces under way, by ticket."""

    def __init__(self, requests: OpenRequests, incarnation: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._workers = requests.workers
        self._incarnation = incarnation
        self._clock = clock
        self._pieces: dict[int, _Piece] = {}
        self._last_ticket = 0
        self._messages: list[tuple[int, ToOthers]] = []
        # When the last piece of each worker had come, by index: the next one has not begun before.
        self._ended: dict[int, float] = {}

    def leaves(self, worker: Worker) -> None:
        """Begin to take a worker's sequences off it."""
        if not worker.leaving:
            worker.leaving = True
            self._requests.request_log.record_event(f"{worker.describe()} is asked to end")

    def advance(self) -> None:
        """Put the sequences of workers that leave, and compute no more, back into the queue. Let rows run on."""
        for worker in self._workers.values():
            if worker.leaving and not worker.in_flight.steps:
                self._empty(worker)
            for arrival in list(worker.arrivals.open):
                self._settle(worker, arrival)

    def next_messages(self) -> list[tuple[int, ToOthers]]:
        """Ask for the next pieces, and dismiss workers. Returns messages for workers, by index."""
        for worker in self._workers.values():
            for arrival in worker.arrivals.open:
                self._ask(worker, arrival)
        for index, worker in self._workers.items():
            if worker.leaving and not worker.dismissed and not self._is_needed(worker):
                worker.dismissed = True
                self._messages.append((index, Dismissal(worker.hello.epoch)))
        messages, self._messages = self._messages, []
        return messages

    def came(self, message: KvPiece) -> None:
        """Pass bytes on, or drop them if their row waits no more. ValueError for a ticket that was never given out."""
        piece = self._pieces.get(message.ticket)
        data: Shareable | None = message.data
        if piece is None or piece.taking or piece.source is not self._workers.get(message.index):
            _drop(data)
            if message.ticket > self._last_ticket:
                raise ValueError(f"no piece has ticket {message.ticket}")
            return
        arrival, target = piece.arrival, piece.target
        there = self._workers.get(target.hello.index) is target
        whole = message.data.nbytes == piece.count * piece.source.hello.block_bytes
        if whole and there and not arrival.cut and target.remote and isinstance(data, SharedMemoryArray):
            data = _inline(data)
            whole = data is not None
        if data is None or not whole or not there or arrival.cut:
            _drop(data)
            del self._pieces[message.ticket]
            arrival.failed |= there and not arrival.cut
            arrival.cut = True
            return
        piece.taking = True
        blocks = np.array(arrival.blocks[piece.first : piece.first + piece.count], np.int32)
        order = TakeKv(self._incarnation, target.hello.epoch, message.ticket, blocks, data)
        self._messages.append((target.hello.index, order))

    def taken(self, message: KvTaken) -> None:
        """Note that a piece is where it belongs. ValueError for a report that fits no order."""
        piece = self._pieces.get(message.ticket)
        if piece is None or not piece.taking or piece.target is not self._workers.get(message.index):
            raise ValueError(f"no piece with ticket {message.ticket} was sent")
        del self._pieces[message.ticket]
        arrival = piece.arrival
        now = self._clock()
        index = piece.source.hello.index
        if message.whole and piece.first == arrival.there:
            arrival.there += piece.count
            piece.target.arrivals.learn(piece.count, now - max(piece.sent, self._ended.get(index, 0.0)))
        else:
            arrival.failed |= not message.whole
            arrival.cut = True
        self._ended[index] = now

    def lose_worker(self, worker: Worker) -> None:
        """Forget a worker that is lost. What it was to send is computed where it has not come."""
        lost = worker.hello.index, worker.hello.epoch
        self._ended.pop(worker.hello.index, None)
        for ticket, piece in list(self._pieces.items()):
            if piece.target is worker or (piece.source is worker and not piece.taking):
                del self._pieces[ticket]
                piece.arrival.cut = True
        for index, message in self._messages:
            if index == worker.hello.index and isinstance(message, TakeKv):
                _drop(message.data)
        self._messages = [each for each in self._messages if each[0] != worker.hello.index]
        for sequence in self._requests.waiting:
            if sequence.elsewhere is not None and sequence.elsewhere.place == lost:
                sequence.elsewhere = None

    # Inside

    def _empty(self, worker: Worker) -> None:
        """Put the sequences of a worker that leaves back into the queue, if there is another worker for them."""
        if not self._others(worker):
            return
        for row in worker.rows.occupied().tolist():
            sequence = worker.give_away(row)
            elsewhere = sequence.elsewhere
            has = "" if elsewhere is None else f", where it has the K and V of {elsewhere.tokens} tokens"
            story = f"worker {worker.hello.index} is asked to end{has}: it looks for another place"
            self._requests.record(sequence, story, Stage.QUEUED)
            self._requests.counters["handed_over"] += 1
            self._requests.waiting.add(sequence)

    def _others(self, worker: Worker) -> bool:
        """Whether another worker takes sequences."""
        others = (other for other in self._workers.values() if other is not worker and not other.leaving)
        return any(GENERATE in other.hello.tasks for other in others)

    def _is_needed(self, worker: Worker) -> bool:
        """Whether a worker that leaves has still something that others want."""
        if not self._others(worker):
            return False
        if worker.rows.running or worker.computing:
            return True
        place = worker.hello.index, worker.hello.epoch
        wanted = [each.elsewhere for each in self._requests.waiting if each.elsewhere is not None]
        wanted += [arrival.source for other in self._workers.values() for arrival in other.arrivals.open]
        return any(elsewhere.place == place for elsewhere in wanted)

    def _settle(self, target: Worker, arrival: Arrival) -> None:
        """End an arrival when all pieces have come, or no more do."""
        arrivals = target.arrivals
        source = self._source(arrival)
        if source is None or not arrivals.has_owner(arrival):
            self._cut(arrival)
        elif not arrivals.pays_on(arrival):
            arrival.failed |= arrivals.takes_too_long(arrival)
            self._cut(arrival)
        complete = arrival.there == len(arrival.blocks)
        if not complete and not (arrival.cut and self._under_way(arrival) == 0):
            return
        if arrival.failed and source is not None and not complete:
            arrivals.learn_failure(arrival, source.prefill_budget)
        sequence = target.beginnings.end_arrival(arrival)
        if sequence is None:
            return
        took = 1e3 * (self._clock() - arrival.began)
        size = target.block_size
        came = min(arrival.tokens, (arrival.first + arrival.there) * size) - arrival.first * size
        lost = arrival.tokens - arrival.first * size - came
        rest = f"; {lost} have not come, and are computed" if lost else ""
        self._requests.counters["shipped_tokens"] += came
        self._requests.record(
            sequence, f"the K and V of {came} tokens came from worker {arrival.source.index} in {took:.1f} ms{rest}"
        )

    def _source(self, arrival: Arrival) -> Worker | None:
        """The worker that has what is to come, if it is still there."""
        worker = self._workers.get(arrival.source.index)
        return worker if worker is not None and worker.hello.epoch == arrival.source.epoch else None

    def _ask(self, target: Worker, arrival: Arrival) -> None:
        """Ask for the next pieces of an arrival."""
        source = self._source(arrival)
        if source is None or arrival.cut:
            return
        if not arrival.asked and target.spill.has_orders:
            # What its blocks held before is still to be saved, with the next step.
            return
        most = max(1, PIECE_BYTES // max(1, source.hello.block_bytes))
        while arrival.asked < len(arrival.blocks) and self._from(source) < MOST_PIECES:
            count = min(most, len(arrival.blocks) - arrival.asked)
            blocks = np.array(arrival.theirs[arrival.asked : arrival.asked + count], np.int32)
            self._last_ticket += 1
            order = ShipKv(self._incarnation, source.hello.epoch, self._last_ticket, blocks)
            self._messages.append((source.hello.index, order))
            piece = _Piece(arrival, source, target, arrival.asked, count, self._clock())
            self._pieces[self._last_ticket] = piece
            arrival.asked += count

    def _cut(self, arrival: Arrival) -> None:
        """Ask for nothing more, and wait only for what is being taken: until then its blocks may be written to."""
        arrival.cut = True
        waited = [ticket for ticket, each in self._pieces.items() if each.arrival is arrival and not each.taking]
        for ticket in waited:
            del self._pieces[ticket]

    def _under_way(self, arrival: Arrival) -> int:
        return sum(piece.arrival is arrival for piece in self._pieces.values())

    def _from(self, source: Worker) -> int:
        return sum(piece.source is source for piece in self._pieces.values())


def _inline(data: SharedMemoryArray) -> Shareable | None:
    """The bytes of a segment, which is removed: its reader cannot open it. None if it is gone."""
    try:
        return data.open()
    except ValueError:
        return None
    finally:
        data.unlink()


def _drop(data: Shareable | None) -> None:
    if isinstance(data, SharedMemoryArray):
        data.unlink()
