"""`tokenyard top`: the figures of a running server in the terminal, once a second, from GET /live.

All figures are the whole server's: tokens of all API processes are added up, and waits are the longest among them. A
table has each process where there are several.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.chat import Server, ServerError

# Values of a row of bars.
BARS = 60
# Seconds after which a process that has written no figures has nothing new: it writes within a second of a change.
QUIET_SECONDS = 2.5
_LEVELS = " ▁▂▃▄▅▆▇█"

Facts = Mapping[str, Any]


@dataclass
class Rates:
    """Counts by second of each API process. What one has written of itself has a time of its own."""

    known: dict[tuple[str, str], float] = field(default_factory=dict)

    def learn(self, now: Facts, before: Facts) -> None:
        """Compare two answers. A process that was started again counts from zero."""
        earlier = {one["replica"]: one for one in before["replicas"]}
        for here in now["replicas"]:
            there = earlier.get(here["replica"])
            seconds = here["time"] - there["time"] if there is not None and there["since"] == here["since"] else 0.0
            for name, count in here["totals"].items():
                if there is not None and seconds > 0:
                    self.known[here["replica"], name] = max(0.0, count - there["totals"][name]) / seconds
                elif now["time"] - here["time"] > QUIET_SECONDS:
                    self.known[here["replica"], name] = 0.0

    def of(self, one: Facts, name: str) -> float:
        return self.known.get((one["replica"], name), 0.0)


@dataclass
class Frames:
    """Makes frames of the answers of /live, each compared with the one before."""

    before: Facts | None = None
    rates: Rates = field(default_factory=Rates)
    output: deque[float] = field(default_factory=lambda: deque(maxlen=BARS))
    prompt: deque[float] = field(default_factory=lambda: deque(maxlen=BARS))
    running: deque[float] = field(default_factory=lambda: deque(maxlen=BARS))
    waiting: deque[float] = field(default_factory=lambda: deque(maxlen=BARS))

    def frame(self, now: Facts) -> RenderableType:
        """The next frame."""
        before = self.before
        self.before = now
        scheduler = now["scheduler"]
        parts: list[RenderableType] = [_head(now)]
        if scheduler is None:
            return Group(*parts, Text("the scheduler is silent: it is being restarted, or stuck", style="red"))
        if before is not None:
            self.rates.learn(now, before)
        rows = (
            ("output tok/s", self.output, self._of_all(now, "generated", before)),
            ("prompt tok/s", self.prompt, self._of_all(now, "prompt", before)),
            ("running", self.running, float(scheduler["running"])),
            ("waiting", self.waiting, float(scheduler["waiting"])),
        )
        figures = Table.grid(padding=(0, 2))
        for name, history, value in rows:
            if value is not None:
                history.append(value)
            figures.add_row(name, "" if value is None else f"{value:.1f}".removesuffix(".0"), bars(history))
        figures.add_row("prefix hits", _hits(now), "")
        figures.add_row("first token", _wait(_longest(now, "first_token_ms")), "")
        figures.add_row("next token", _wait(_longest(now, "between_tokens_ms")), "")
        tables = [_workers(now, before)]
        if len(now["replicas"]) > 1:
            tables.append(_replicas(now, self.rates))
        return Group(*parts, figures, *tables, _counters(scheduler))

    def _of_all(self, now: Facts, name: str, before: Facts | None) -> float | None:
        return None if before is None else sum(self.rates.of(one, name) for one in now["replicas"])


def top(url: str, key: str, every: float, once: bool) -> int:
    """Show frames until the user leaves, or one. Returns the exit status."""
    server = Server(url, key)
    console = Console()
    frames = Frames()
    try:
        if once:
            console.print(frames.frame(_ask(server)))
            return 0
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as screen:
            while True:
                screen.update(_next(frames, server), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return 0
    except ServerError as error:
        print(f"tokenyard: {error}", file=sys.stderr)
        return 1


def _next(frames: Frames, server: Server) -> RenderableType:
    """The next frame. A server that is away for a moment is not the end."""
    try:
        return frames.frame(_ask(server))
    except ServerError as error:
        if frames.before is None:
            raise
        return Text(f"{error}; trying again", style="red")


def _ask(server: Server) -> Facts:
    found = server.read("/live")
    if not isinstance(found, dict) or "totals" not in found:
        raise ServerError("/live is not what a tokenyard server answers: is --url that of one?")
    return found


def _head(now: Facts) -> Text:
    state = "ready" if now["ready"] else f"not ready: {now['reason']}"
    text = Text(f"{now['model']}  ", style="bold")
    text.append(state, style="green" if now["ready"] else "red")
    count = len(now["replicas"])
    text.append(f"  tokenyard {now['version']}, {count} API process{'es' if count > 1 else ''}", style="dim")
    return text


def _rate(now: Facts, before: Facts | None, of: Callable[[Facts], float]) -> float | None:
    """A count of the scheduler's by second. None for one that was started again, which counts from zero."""
    if before is None:
        return None
    seconds = now["time"] - before["time"]
    grown = of(now) - of(before)
    return grown / seconds if seconds > 0 and grown >= 0 else None


def _hits(now: Facts) -> str:
    cached, prompt = (sum(one["totals"][name] for one in now["replicas"]) for name in ("cached", "prompt"))
    return f"{100 * cached / prompt:.0f} %" if prompt else ""


def _longest(now: Facts, name: str) -> Mapping[str, float] | None:
    """The longest p50 and p99 of a kind of wait among the API processes."""
    known = [one[name] for one in now["replicas"] if one[name] is not None]
    return {part: max(each[part] for each in known) for part in ("p50", "p99")} if known else None


def _wait(milliseconds: Mapping[str, float] | None) -> str:
    return "" if milliseconds is None else f"{milliseconds['p50']:.1f} ms, p99 {milliseconds['p99']:.1f}"


def _workers(now: Facts, before: Facts | None) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("worker", "device", "running", "KV used", "cached", "steps/s", "last step"):
        table.add_column(title, justify="left" if title in ("worker", "device") else "right")
    for number, worker in enumerate(now["scheduler"]["workers"]):
        total = worker["blocks_total"]

        def steps(facts: Facts, number: int = number, epoch: int = worker["epoch"]) -> float:
            workers = (facts["scheduler"] or {"workers": []})["workers"]
            known = number < len(workers) and workers[number]["epoch"] == epoch
            return float(workers[number]["steps"]) if known else float("inf")

        rate = _rate(now, before, steps)
        table.add_row(
            f"{worker['index']} (epoch {worker['epoch']})",
            f"{worker['device']} {worker['backend']}",
            str(worker["running"]),
            f"{100 * worker['blocks_used'] / total:.0f} %" if total else "",
            f"{100 * worker['blocks_cached'] / total:.0f} %" if total else "",
            "" if rate is None else f"{rate:.0f}",
            f"{worker['seconds_since_step']:.1f} s" if worker["seconds_since_step"] > 1 else "",
        )
    return table


def _replicas(now: Facts, rates: Rates) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("API process", "output tok/s", "prompt tok/s", "first token", "next token"):
        table.add_column(title, justify="left" if title == "API process" else "right")
    for one in now["replicas"]:
        speeds = (f"{rates.of(one, name):.1f}".removesuffix(".0") for name in ("generated", "prompt"))
        table.add_row(one["replica"], *speeds, _wait(one["first_token_ms"]), _wait(one["between_tokens_ms"]))
    return table


def _counters(scheduler: Facts) -> Text:
    known = [f"{count} {name.replace('_', ' ')}" for name, count in scheduler["counters"].items() if count]
    return Text("since the start: " + (", ".join(known) or "nothing"), style="dim")


def bars(values: deque[float]) -> str:
    """A row of bars, the latest at its right end, each as high as its share of the largest."""
    most = max(values, default=0.0)
    steps = len(_LEVELS) - 1
    return "".join(_LEVELS[round(steps * value / most) if most else 0] for value in values)
