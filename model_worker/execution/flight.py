"""Steps in flight: launched, and their results not read."""

from __future__ import annotations

from collections.abc import Callable

from interfaces import StepResult


class Pending:
    """A launched step. Its result is made when it is asked for."""

    def __init__(self, read: Callable[[], StepResult]) -> None:
        """`read` waits for the result. It is called once."""
        self._read = read
        self._result: StepResult | None = None

    @classmethod
    def finished(cls, result: StepResult) -> Pending:
        """A step that has its result already."""
        pending = cls(lambda: result)
        pending.result()
        return pending

    @property
    def done(self) -> bool:
        """Whether the result is there, so that `result` does not wait."""
        return self._result is not None

    def result(self) -> StepResult:
        """Wait for the result, if need be."""
        if self._result is None:
            self._result = self._read()
        return self._result


class InFlight:
    """The launched steps of one worker whose results were not read, oldest first."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []

    def __len__(self) -> int:
        return sum(not pending.done for pending in self._pending)

    def add(self, pending: Pending) -> None:
        self._pending = [each for each in self._pending if not each.done]
        self._pending.append(pending)

    def finish(self) -> None:
        """Wait for all results."""
        for pending in self._pending:
            pending.result()
        self._pending.clear()
