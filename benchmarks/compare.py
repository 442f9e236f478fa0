"""`python -m benchmarks.compare --peer vllm`: ours and peers under the standard work, in turns, in one session.

All servers of a model are up at the same time and only one of them works: round by round, and within a round work by
work, each is measured in its turn, so that whatever else happens on the machine is unfair to none. Exit code 1 means
that requests failed, that a peer did not start, or that there was nothing to compare with.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks.cells import Cell, failed, measured_cell, rate_of
from benchmarks.comparison import Comparison
from benchmarks.comparison_plot import write_plots
from benchmarks.comparison_report import print_comparison, write_comparison
from benchmarks.contenders import OURS, AtUrl, Contender, Entrant, Installed, Ours
from benchmarks.peers import known_peers
from benchmarks.peers.peer import PeerError
from benchmarks.places import default_cache, standard_model_in
from benchmarks.processes import peak_memory
from benchmarks.server import ServerError
from benchmarks.standard_work import Needs, StandardWork, chosen_work, kind_of

TABLE_WIDTH = 160
SHORT = {"rounds": 1, "seconds": 3.0}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    if options.short:
        vars(options).update(SHORT)
    try:
        works = chosen_work(options.work, options.short)
        peers = chosen_peers(options.peer, options.cache, arguments[split + 1 :])
        works = _for_peers(works, peers)
        if not peers:
            raise ValueError("no peer to compare with")
        if not works:
            raise ValueError(f"no peer does the work: {', '.join(peer.name for peer in peers)}; choose another WORK")
        return uvloop.run(Session(options, [Ours(OURS, arguments[split + 1 :]), *peers]).run(works))
    except (ServerError, PeerError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1


def chosen_peers(names: str, cache: Path, our_flags: Sequence[str]) -> list[Entrant]:
    """Those of the list that are there; the others are said to be missing. Raises ValueError for an unknown name."""
    known, found = known_peers(cache), list[Entrant]()
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name.startswith(("http://", "https://")):
            found.append(AtUrl(name))
        elif name == OURS:
            found.append(Ours(f"{OURS} again", our_flags))
        elif name not in known:
            raise ValueError(f"peer must be {', '.join(known)}, {OURS} or a base URL, got {name!r}")
        elif known[name].installed:
            found.append(Installed(known[name]))
        else:
            print(f"{name} is skipped: it is not in {known[name].home}; to install it: make peer PEER={name}")
    return found


def _for_peers(works: Sequence[StandardWork], peers: Sequence[Entrant]) -> Sequence[StandardWork]:
    """The work that some peer can do.

    A server at a URL has one model, and it is for the caller to say whose work it can take.
    """
    models = {work.model for work in works}
    urls = [peer.name for peer in peers if isinstance(peer, AtUrl)]
    if urls and len(models) > 1:
        groups = [
            ",".join(dict.fromkeys(kind_of(work.name) for work in works if work.model == model))
            for model in sorted(models)
        ]
        choices = " or WORK=".join(groups)
        raise ValueError(f"{urls[0]} serves one model, and the work is for {len(models)}: choose WORK={choices}")
    return [work for work in works if any(peer.takes(work.embeds) for peer in peers)]


@dataclass
class Session:
    """One comparison, from the first start to the last file."""

    options: argparse.Namespace
    entrants: Sequence[Entrant]

    async def run(self, works: Sequence[StandardWork]) -> int:
        options = self.options
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / time.strftime("compare-%Y%m%d-%H%M%S")
        result = Comparison(options.seconds, options.threads, load_before=os.getloadavg()[0])
        for model in dict.fromkeys(work.model for work in works):
            await self._with_model(model, [work for work in works if work.model == model], result, stem)
        result = replace(result, load_after=os.getloadavg()[0])
        print_comparison(result, Console(width=TABLE_WIDTH))
        write_comparison(result, stem.with_suffix(".json"))
        plots = write_plots(result, stem)
        print("written:", ", ".join(str(path) for path in (stem.with_suffix(".json"), *plots)))
        return 1 if failed(result.cells) or result.left_out else 0

    async def _with_model(self, size: str, works: Sequence[StandardWork], result: Comparison, stem: Path) -> None:
        model, needs = standard_model_in(self.options.cache, size), Needs.of(works, self.options.threads)
        async with contextlib.AsyncExitStack() as stack:
            contenders: list[Contender] = []
            for index, entrant in enumerate(self.entrants):
                if not entrant.takes(needs.embeds):
                    continue
                log = stem.with_name(f"{stem.name}-{size}-{index}.log")
                running = entrant.running(model, needs, log, self.options.start_timeout)
                try:
                    contender = await stack.enter_async_context(running)
                except (ServerError, PeerError) as error:
                    if not contenders:
                        raise
                    # The others are worth measuring, and a quiet machine is rare.
                    print(f"{entrant.name} is left out of the work on the {size} model: {error}", file=sys.stderr)
                    result.left_out.append(f"{entrant.name} on {size}")
                    continue
                await contender.step_back()
                contenders.append(contender)
                result.starts.append(start_of(contender, size))
            for round_ in range(1, self.options.rounds + 1):
                for work in works:
                    for contender in contenders:
                        result.cells.append(await self._turn(work, contender, contenders, round_))
                write_comparison(result, stem.with_suffix(".json"))

    async def _turn(
        self, work: StandardWork, contender: Contender, contenders: Sequence[Contender], round_: int
    ) -> Cell:
        others = [other for other in contenders if other is not contender]
        await contender.step_forward()
        before, began = sum(other.cpu_s() for other in others), time.monotonic()
        cell = await measured_cell(work, contender.client, contender.name, contender.pid, round_, self.options.seconds)
        idle = (sum(other.cpu_s() for other in others) - before) / (time.monotonic() - began)
        await contender.step_back()
        trouble = f", {cell.failures}" if cell.failures else ""
        rate = rate_of(cell)
        line = f"{work.name}, round {round_}, {contender.name}: {cell.figures[rate]:.1f} {rate}{trouble}"
        print(line, file=sys.stderr, flush=True)
        return replace(cell, idle_cpu_share=idle)


def start_of(contender: Contender, model: str) -> Mapping[str, object]:
    peak = None if contender.pid is None else peak_memory(contender.pid)
    return {
        "contender": contender.name,
        "model": model,
        "command": contender.command,
        "first answer after, s": contender.start_s,
        "peak memory of its largest process then, MB": None if peak is None else peak >> 20,
        "while others are measured": "stopped (SIGSTOP)" if contender.freezes else "idle",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        epilog="Flags after -- go to our server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--peer", required=True, help="list of peers (python -m benchmarks.peers list), base URLs, or ours: by chance")
    add(
        "--work",
        default="",
        help="list of W1 to W6, E1 to E3 or E1/32, and Q1, Q16 and Q512; empty: all but Q that a peer does",
    )
    add("--rounds", type=int, default=3, help="of which the median counts")
    add("--seconds", type=float, default=20.0, help="after which a cell is cut off")
    add("--threads", type=int, default=os.cpu_count(), help="of each server")
    add("--start-timeout", type=float, default=600.0, help="seconds for a server's first answer")
    add("--cache", type=Path, default=default_cache(), help="folder of the peers and models")
    add("--out", type=Path, default=Path("bench-results"), help="folder for the JSON, the PNGs and the servers' logs")
    add("--short", action="store_true", help="all work on the tiny model, in seconds: shows that the harness works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
