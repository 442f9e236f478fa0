"""Rows that wait for images: how far they may run, which pieces of a prompt may not be cut, and since when they wait.

A worker encodes the images of a row from the step on that it joined with, beside its steps, and says how far the row
may run. Knows spans of tokens. Does not know pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from interfaces import CUT_IMAGES, NO_IMAGES, WHOLE_PROMPTS, Ready
from scheduler.rows import ALL_TOKENS, RowTable
from scheduler.sequence import Sequence

# Seconds without an image that is ready, after which a worker that has images to encode seems to hang.
ENCODE_SECONDS = 600.0


class ImageRows:
    """The rows of one worker that have images. `takes` is `WorkerHello.images`."""

    def __init__(self, table: RowTable, takes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.takes = takes
        self._table = table
        self._clock = clock
        # Since when the worker has been encoding the image that it encodes now; None while it has none.
        self._since: float | None = None

    def placed(self, sequence: Sequence, cached: int) -> None:
        """Hold a row back from the first of its images that is not in cached blocks."""
        if self.takes == NO_IMAGES:
            return
        missing = [image.start_idx for image in sequence.images if image.end_idx > cached]
        if missing:
            # No other row waits, so the time of an image whose row has gone meanwhile does not count.
            if not len(self._table.waiting_for_images()):
                self._since = self._clock()
            self._table.upto[sequence.row] = 0 if self.takes == WHOLE_PROMPTS else missing[0]

    def ready(self, message: Ready) -> tuple[list[tuple[Sequence, float]], list[tuple[Sequence, str]]]:
        """Let rows run on. Returns the sequences that have all of their images, with the seconds of encoding, and those
        that cannot have them, with the reasons.

        Rows that have changed their owner meanwhile are left as they are. ValueError for broken columns.
        """
        table = self._table
        rows = message.rows.tolist()
        seconds = np.zeros(len(rows), np.float32) if message.seconds is None else message.seconds
        if not len(rows) == len(message.joined) == len(message.upto) == len(seconds):
            raise ValueError("the columns of a message about images do not fit together")
        complete = []
        failed = []
        columns = (message.joined.tolist(), message.upto.tolist(), seconds.tolist())
        for row, joined, upto, taken in zip(rows, *columns, strict=True):
            if not 0 <= row < len(table.sequences) or not table.in_use[row] or table.joined[row] != joined:
                continue
            if row in message.errors:
                failed.append((table.sequence(row), message.errors[row]))
                continue
            if self.takes != WHOLE_PROMPTS or upto == ALL_TOKENS:
                table.upto[row] = upto
            if upto == ALL_TOKENS:
                complete.append((table.sequence(row), taken))
        self._since = self._clock() if len(table.waiting_for_images()) else None
        return complete, failed

    def encoding(self) -> list[Sequence]:
        """The sequences whose images the worker may be encoding now: if it dies, one of them may be the reason."""
        table = self._table
        rows = table.waiting_for_images()
        rows = rows[table.joined[rows] > 0]
        if not len(rows):
            return []
        first = table.joined[rows].min()
        return [table.sequence(row) for row in rows[table.joined[rows] == first].tolist()]

    def lateness(self) -> float | None:
        """Seconds that an image has taken that takes too long; None while none does."""
        if self._since is None or not len(self._table.waiting_for_images()):
            return None
        taken = self._clock() - self._since
        return taken if taken > ENCODE_SECONDS else None

    def grant_grace(self) -> None:
        """Count the time of the image from now."""
        if self._since is not None:
            self._since = self._clock()

    def whole(self, row: int, share: int) -> int:
        """Change the number of tokens that a row computes next so that it cuts no image where none may be cut.

        The result is larger than `share` where the row goes on with an image that is longer.
        """
        if self.takes <= CUT_IMAGES:
            return share
        sequence = self._table.sequence(row)
        computed = int(self._table.num_computed_tokens[row])
        for start, end in self._spans(sequence):
            if start < computed + share < end:
                return start - computed if start > computed else end - computed
        return share

    def shares_prefix(self, sequence: Sequence) -> bool:
        """Whether other sequences may use the blocks of this one, and it theirs."""
        return self.takes != WHOLE_PROMPTS or not sequence.images

    def _spans(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Tokens that see each other, and must be computed in one step."""
        if not sequence.images:
            return []
        if self.takes == WHOLE_PROMPTS:
            return [(0, sequence.prompt_len)]
        return [(image.start_idx, image.end_idx) for image in sequence.images]
