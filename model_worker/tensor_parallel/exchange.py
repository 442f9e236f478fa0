"""Sums and gathers tensors over the ranks of one host, through memory that they share.

Each rank has a counter of its exchanges, a stamp of the last one, and two slots, which it writes by turns: it can write
one again only after all have read it, because they have arrived at the exchange after it by then. All ranks add in the
order of the ranks, so that all get the same bits. Knows tensors and counters. Does not know what is computed, nor how
the memory came to be shared.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

# Bytes of the counters of one rank: a cache line of its own, so that a rank that counts disturbs no other.
_LINE_BYTES = 64
_WORD_BYTES = 8
# Looks at the counters before a rank lets others have its core, and before it sleeps.
_BUSY_LOOKS = 200
_YIELDING_LOOKS = 600
# Seconds that a waiting rank sleeps at first, and at most.
_SHORT_SLEEP = 5e-5
_LONG_SLEEP = 1e-3
# Seconds between two looks at whether the others live.
_LOOK_SECONDS = 0.02
# The most seconds between two looks that count as waiting: a rank that was stopped itself accuses no other.
_MOST_COUNTED = 0.1
# Seconds for which a rank is awaited while all start: it may still read its weights.
START_SECONDS = 1800.0
# Words of a rank's line, behind its counter and its two stamps: its last steps.
_BEGUN = 3
_ENDED = 4
# Kinds of exchanges, as stamps have them.
_SUM = 1
_GATHER = 2


class GroupLost(Exception):
    """A rank has died, hangs or does something else than the others, so that none of them can go on.

    `blamed`: what was being computed may be the reason. It is not where a link was cut, or a rank was asked to end.
    """

    def __init__(self, story: str, blamed: bool = True) -> None:
        super().__init__(story)
        self.blamed = blamed


class NotMet(GroupLost):
    """The ranks have not come together: another one is not there yet, or has another version or setting for now."""

    def __init__(self, story: str) -> None:
        super().__init__(story, blamed=False)


class Exchange:
    """One rank's end of the shared memory, which `bytes_for` says the size of.

    `check_peers` raises GroupLost where another rank has gone. `pids` are the processes of the ranks. `patience` is the
    number of seconds for which the slowest rank may be awaited.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        pids: Sequence[int],
        slot_bytes: int,
        check_peers: Callable[[], None] = lambda: None,
        patience: float = START_SECONDS,
    ) -> None:
        self.rank = rank
        self.ranks = len(pids)
        self.patience = patience
        self._pids = pids
        self._slot_bytes = slot_bytes
        self._check_peers = check_peers
        self._words = memoryview(memory)[: self.ranks * _LINE_BYTES].cast("q")
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=self.ranks * _LINE_BYTES)
        self._slots = slots[: 2 * self.ranks * slot_bytes].view(2, self.ranks, slot_bytes)
        self._fence = Lock()
        self._number = 0

    @staticmethod
    def bytes_for(ranks: int, slot_bytes: int) -> int:
        """Return the size of the memory that so many ranks share."""
        return ranks * _LINE_BYTES + 2 * ranks * slot_bytes

    def write_steps(self, begun: int, ended: int) -> None:
        """Show the others the numbers of this rank's last steps."""
        line = self.rank * _LINE_BYTES // _WORD_BYTES
        self._words[line + _BEGUN] = begun
        self._words[line + _ENDED] = ended

    def read_steps(self, rank: int) -> tuple[int, int]:
        """Return the numbers of a rank's last steps: that has begun, and that has ended."""
        line = rank * _LINE_BYTES // _WORD_BYTES
        return self._words[line + _BEGUN], self._words[line + _ENDED]

    def name(self, rank: int) -> str:
        """Name a rank for people, with its process, and whether that was stopped."""
        pid = self._pids[rank]
        return f"rank {rank} (pid {pid}{_state(pid)})"

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which have one shape. It is computed in float32."""
        flat = part.contiguous().view(-1)
        total = torch.empty(flat.shape, dtype=part.dtype)
        step = self._slot_bytes // part.element_size()
        for first in range(0, len(flat), step):
            mine = flat[first : first + step]
            parts = self._swap(_SUM, mine, [len(mine)] * self.ranks)
            added = parts[0].float()
            for other in parts[1:]:
                added = added + other
            total[first : first + step] = added
        return total.view(part.shape)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Join the ranks' parts along the last dimension. `widths` are their sizes in it.

        ValueError for a row that does not fit a slot.
        """
        rows = part.contiguous().view(-1, part.shape[-1])
        step = self._slot_bytes // (part.element_size() * max(widths))
        if step < 1:
            raise ValueError(f"a row of {max(widths)} elements does not fit a slot of {self._slot_bytes} bytes")
        whole = torch.empty((len(rows), sum(widths)), dtype=part.dtype)
        for first in range(0, len(rows), step):
            mine = rows[first : first + step]
            parts = self._swap(_GATHER, mine.reshape(-1), [len(mine) * width for width in widths])
            joined = whole[first : first + step].split(list(widths), dim=1)
            for place, other, width in zip(joined, parts, widths, strict=True):
                place.copy_(other.view(-1, width))
        return whole.view(*part.shape[:-1], sum(widths))

    def _swap(self, kind: int, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Give the others a flat tensor. Returns those of all ranks, which stay until the exchange after the next."""
        self._number += 1
        number = self._number
        slots = self._slots[number % 2]
        slots[self.rank][: mine.nbytes].view(mine.dtype).copy_(mine)
        stamp = zlib.crc32(f"{kind} {mine.dtype} {list(sizes)}".encode())
        self._write(stamp, number)
        self._wait_for(number)
        self._order_memory()
        self._compare(stamp, number)
        return [slots[rank][: size * mine.element_size()].view(mine.dtype) for rank, size in enumerate(sizes)]

    def _write(self, stamp: int, number: int) -> None:
        """Count this rank's exchange, after all that it has written."""
        line = self.rank * _LINE_BYTES // _WORD_BYTES
        # A rank that is one exchange ahead overwrites no stamp that another one still has to read.
        self._words[line + 1 + number % 2] = stamp
        self._order_memory()
        self._words[line] = number

    def _order_memory(self) -> None:
        """Let no processor move reads or writes across this point: a lock that is released and taken orders both."""
        for _ in range(2):
            with self._fence:
                pass

    def _arrived(self, rank: int) -> int:
        """Return the number of a rank's last exchange."""
        return self._words[rank * _LINE_BYTES // _WORD_BYTES]

    def _wait_for(self, number: int) -> None:
        looks = 0
        waited = 0.0
        sleep = _SHORT_SLEEP
        last = time.monotonic()
        next_check = last + _LOOK_SECONDS
        for rank in range(self.ranks):
            while self._arrived(rank) < number:
                looks += 1
                if looks < _BUSY_LOOKS:
                    continue
                if looks < _YIELDING_LOOKS:
                    os.sched_yield()
                    continue
                time.sleep(sleep)
                sleep = min(2 * sleep, _LONG_SLEEP)
                now = time.monotonic()
                waited += min(now - last, _MOST_COUNTED)
                last = now
                if now >= next_check:
                    next_check = now + _LOOK_SECONDS
                    self._check_peers()
                    if waited > self.patience:
                        raise GroupLost(self._story(rank, number, waited))

    def _story(self, rank: int, number: int, waited: float) -> str:
        """Say which rank is awaited."""
        done = self._arrived(rank)
        return f"{self.name(rank)} hangs: it has not come to exchange {number} in {waited:.0f} s, its last was {done}"

    def _compare(self, stamp: int, number: int) -> None:
        """Raise GroupLost for a rank that exchanges something else: what it computes is not what the others do."""
        for rank in range(self.ranks):
            other = self._words[rank * _LINE_BYTES // _WORD_BYTES + 1 + number % 2]
            if other != stamp:
                blamed = self.rank if rank == 0 else rank
                raise GroupLost(
                    f"rank {blamed} (pid {self._pids[blamed]}) diverges: in exchange {number} rank {self.rank} has "
                    f"{stamp:08x} and rank {rank} has {other:08x}"
                )


def _state(pid: int) -> str:
    """Say in words that a process was stopped; empty if it was not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return ", stopped by a signal" if state in "Tt" else ""
