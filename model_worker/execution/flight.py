"""Steps in flight: launched, and their results not all read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from interfaces import StepResult


class Pending:
    """A launched step and the `steps - 1` repetitions launched with it.

    Results are read in order, and made when they are asked for.
    """

    def __init__(
        self, read: Callable[[int], StepResult], steps: int = 1, stop: Callable[[bool], int] | None = None
    ) -> None:
        """`read(number)` waits for the result of a step. `stop(for_good)` skips the steps that have not begun, and
        returns how many have."""
        self.steps = steps
        self._read = read
        self._stop = stop
        self._results: deque[StepResult] = deque()
        self._asked = 0
        self._taken = 0

    @classmethod
    def finished(cls, *results: StepResult) -> Pending:
        """Steps that have their results already."""
        pending = cls(results.__getitem__, len(results))
        pending.finish()
        return pending

    @property
    def left(self) -> int:
        """How many results were not taken yet."""
        return self.steps - self._taken

    @property
    def running(self) -> bool:
        """Whether a result was not read from the device yet."""
        return self._asked < self.steps

    @property
    def done(self) -> bool:
        """Whether the next result is there, so that `result` does not wait."""
        return bool(self._results)

    def result(self) -> StepResult:
        """Take the next result. Waits for the device if need be."""
        if not self._results:
            self._make()
        self._taken += 1
        return self._results.popleft()

    def stop(self, for_good: bool = True) -> None:
        """Skip the steps that have not begun: for good if another step follows; else they will be launched anew."""
        if self._stop is not None and self.running:
            self.steps = self._stop(for_good)

    def finish(self) -> None:
        """Wait for all results."""
        while self.running:
            self._make()

    def _make(self) -> None:
        self._results.append(self._read(self._asked))
        self._asked += 1


class InFlight:
    """The launched steps of one worker that still owe results, oldest first."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []
        self._read_first = False

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, pending: Pending) -> None:
        self._pending.append(pending)

    def stop(self) -> None:
        """Skip what has not begun: another step follows."""
        for pending in self._pending:
            pending.stop()

    def hold(self) -> None:
        """Begin nothing more. If the next step has one row, which may be guessed then, read everything before it."""
        self._read_first = True
        for pending in self._pending:
            pending.stop(for_good=False)

    def prepare(self, rows: int) -> None:
        """Forget steps that were read, before a step of so many rows is packed."""
        if self._read_first and rows == 1:
            self.finish()
        self._pending = [pending for pending in self._pending if pending.running]
        self._read_first = False

    def finish(self) -> None:
        """Wait for all results."""
        for pending in self._pending:
            pending.finish()
