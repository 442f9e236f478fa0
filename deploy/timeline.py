"""The display of a server's start: one line per process with the time of each phase, and progress bars.

On a terminal the phases in work are shown live; elsewhere each process gets plain lines, or lines of JSON. Everything
goes to standard error. Knows phases by the names that the children report (shared/phases.py), and not their meaning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deploy.child import ChildSpec
from shared import logs

_SECONDS_BETWEEN_LINES = 5.0
_FIRST_PHASE = "start python"


@dataclass
class _Track:
    """The start of one child: finished phases with their seconds, and the one in work."""

    started_at: float
    phase: str = _FIRST_PHASE
    phase_since: float = 0.0
    phases: list[tuple[str, float]] = field(default_factory=list)
    said_at: float = 0.0
    bar: TaskID | None = None

    def begin(self, phase: str, now: float) -> None:
        self.phases.append((self.phase, now - self.phase_since))
        self.phase = phase
        self.phase_since = now

    def summary(self, now: float) -> str:
        finished = [*self.phases, (self.phase, now - self.phase_since)]
        steps = [f"{name} {seconds:.1f}s" for name, seconds in finished if seconds >= 0.05]
        return " | ".join([*steps, f"ready {now - self.started_at:.1f}s"])


class Timeline:
    """The supervisor's observer (supervisor.py) that draws."""

    def __init__(
        self,
        on_ready: Callable[[], None] = lambda: None,
        on_exit: Callable[[int], None] = lambda _: None,
        console: Console | None = None,
        form: str = "text",
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self._form = form
        self._console = console or Console(stderr=True)
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._on_stopping = on_stopping
        self._tracks: dict[str, _Track] = {}
        self._bars: Progress | None = None
        self._width = 0

    def started(self, child: ChildSpec) -> None:
        now = time.monotonic()
        self._width = max(self._width, len(child.name))
        track = self._tracks[child.name] = _Track(now, phase_since=now, said_at=now)
        if self._console.is_terminal and self._form == "text":
            track.bar = self._show_bar(child.name)

    def event(self, child: ChildSpec, event: dict[str, Any]) -> None:
        track = self._tracks[child.name]
        now = time.monotonic()
        match event.get("event"):
            case "phase":
                track.begin(str(event.get("name")), now)
                self._update_bar(track, description=_label(child.name, track.phase), total=None, completed=0, amount="")
            case "progress":
                self._progress(child.name, track, event, now)
            case "ready":
                self._hide_bar(track)
                facts = {key: value for key, value in event.items() if key != "event"}
                self._say_ready(child.name, track.summary(now), facts)

    def output(self, line: str) -> None:
        """Write a line of a child, or one about the whole server. In JSON mode every line is JSON, whatever its
        source."""
        raw = self._form == "json" and not logs.is_record(line)
        self._write(logs.line("json", time.time(), "INFO", "output", line, {}) if raw else line)

    def _write(self, line: str) -> None:
        # A terminal that went away or a closed pipe must not end the server.
        with contextlib.suppress(OSError):
            if self._bars is not None:
                self._console.out(line, highlight=False)
            else:
                self._console.file.write(line + "\n")
                self._console.file.flush()

    def say(self, level: str, text: str) -> None:
        self._write(logs.line(self._form, time.time(), level, "supervisor", text, {}))

    def exited(self, child: ChildSpec, pid: int) -> None:
        self._hide_bar(self._tracks[child.name])
        self._on_exit(pid)

    def silent(self, child: ChildSpec, seconds: float) -> None:
        if seconds:
            self.say("WARNING", f"{child.title} has been silent for {seconds:.0f} s")

    def hung(self, child: ChildSpec) -> None:
        pass

    def all_ready(self) -> None:
        self._on_ready()

    def stopping(self) -> None:
        self._on_stopping()

    def close(self) -> None:
        """Give the terminal back, whatever is still in work."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _say_ready(self, name: str, summary: str, facts: dict[str, Any]) -> None:
        if self._form == "json":
            record = {"process": name, **facts}
            self._write(logs.line("json", time.time(), "INFO", "supervisor", f"{name} is ready: {summary}", record))
            return
        beside = ", ".join(f"{key} {value}" for key, value in facts.items())
        self._write(f"  {name:{self._width}}  {summary}" + (f"  ({beside})" if beside else ""))

    def _progress(self, name: str, track: _Track, event: dict[str, Any], now: float) -> None:
        done = int(event.get("done", 0))
        total = int(event.get("total", 0))
        unit = str(event.get("unit", ""))
        amount = _amount(done, total, unit)
        if track.bar is not None:
            self._update_bar(track, total=total, completed=done, amount=amount)
        elif done and now - track.said_at >= _SECONDS_BETWEEN_LINES:
            track.said_at = now
            self.output(f"  {name:{self._width}}  {track.phase}: {amount}")

    def _show_bar(self, name: str) -> TaskID:
        if self._bars is None:
            columns = (TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
            self._bars = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._bars.start()
        return self._bars.add_task(_label(name, _FIRST_PHASE), total=None, amount="")

    def _update_bar(self, track: _Track, **changes: Any) -> None:
        if self._bars is not None and track.bar is not None:
            self._bars.update(track.bar, **changes)

    def _hide_bar(self, track: _Track) -> None:
        if self._bars is None or track.bar is None:
            return
        self._bars.remove_task(track.bar)
        track.bar = None
        if not self._bars.tasks:
            self.close()


def _label(name: str, phase: str) -> str:
    return f"{name:15} {phase:16}"


def _amount(done: int, total: int, unit: str) -> str:
    if unit != "bytes":
        return f"{done} of {total} {unit}"
    size, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / size:.1f} of {total / size:.1f} {name}"
