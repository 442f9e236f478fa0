"""What the trainings of the text model and of its eyes share: rates, steps, progress and an early end."""

import signal
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def rate(progress: float, warm_up: float, decay_from: float) -> float:
    """Share of the full learning rate: a short warm-up, a plateau, then down to zero in a straight line."""
    if progress < warm_up:
        return (progress + 1e-3) / (warm_up + 1e-3)
    return min(1.0, max(0.0, (1.0 - progress) / (1.0 - decay_from)))


def move(learning: Sequence[torch.Tensor], rates: Mapping[torch.optim.Optimizer, float], share: float) -> None:
    """Change parameters by their gradients, at a share of each optimizer's full rate, and forget the gradients."""
    torch.nn.utils.clip_grad_norm_(learning, 1.0)
    for optimizer, full in rates.items():
        for group in optimizer.param_groups:
            group["lr"] = full * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def progress_bar(console: Console) -> Progress:
    """Make a bar whose tasks have a field `note`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console)


class Interruption:
    """`with Interruption() as interruption:` SIGTERM and SIGINT do not end the process, but set `was_asked_for`."""

    def __init__(self) -> None:
        self.was_asked_for = False

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.was_asked_for = True
