"""The flags of `tokenyard bench` and `tokenyard bench plot`. What they do is loaded when it is wanted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import setproctitle

from deploy.bench.names import KEY_VARIABLE, LIMITS, PREFIX, RANDOM

# The command line writes `bench plot` so: a positional argument and a subcommand cannot share a place.
PLOT = "bench-plot"
_EXAMPLES = """\
examples:
  tokenyard bench http://127.0.0.1:8000                                16 in flight
  tokenyard bench http://127.0.0.1:8000 --concurrency 1,4,16,64        a sweep over given loads
  tokenyard bench http://127.0.0.1:8000 --rate 1 --sweep               requests a second, doubled until it is too much
  tokenyard bench URL --rate 4 --goodput ttft:500 tpot:50 --save a.json
  tokenyard bench URL --dataset ShareGPT_V3.json --chat                conversations of a file
  tokenyard bench plot a.json b.json -o page.html                      result files as one page

exit status: 0; 1 when requests failed, there was no server, or the load generator itself was the limit; 2 for flags
that cannot work. docs/benchmarking.md defines each figure.
"""


def add(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure a server that speaks OpenAI's API",
        description="Sends load to /v1/completions or /v1/chat/completions of any server, and prints its figures.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_load(parser)
    _add_requests(parser)
    add_argument = parser.add_argument
    add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help=f"limits, of {', '.join(LIMITS)}")
    add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON, with the keys of `vllm bench`")
    add_argument("--label", default="", metavar="TEXT", help="a name in the result file")
    parser.set_defaults(run=_bench)
    plot_parser = commands.add_parser(
        PLOT, prog="tokenyard bench plot", description="Draws result files as one HTML page that loads nothing."
    )
    plot_parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of `tokenyard bench` or `vllm bench`")
    plot_parser.add_argument("-o", "--output", type=Path, default=Path("bench.html"), help="(default: bench.html)")
    plot_parser.set_defaults(run=_plot)


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    add("--model", default="", help="model name (default: the first one the server names)")
    add("--api-key", default="", metavar="KEY", help=f"key of the server [{KEY_VARIABLE}]")
    add(
        "--rate", default="", metavar="R[,R...]", help="requests a second that arrive, whether or not others have ended"
    )
    add(
        "--concurrency",
        default="",
        metavar="N[,N...]",
        help="requests in flight (default: 16, without a rate); with a rate, the most",
    )
    add("--sweep", action="store_true", help="double the load until the server is saturated")
    add("--burstiness", type=_positive, default=1.0, metavar="B", help="1: Poisson; below 1: in bursts; above: evenly")
    add("--duration", type=_positive, default=30.0, metavar="S", help="seconds of arrivals at a rate (default: 30)")
    add("--requests", type=_count, default=None, metavar="N", help="of each load (default: 4 rounds, or the duration)")
    add("--warmup", type=int, default=4, metavar="N", help="requests before, which are not measured (default: 4)")
    add("--time-limit", type=_positive, default=600.0, metavar="S", help="of each load (default: 600)")
    add("--request-timeout", type=_positive, default=300.0, metavar="S", help="(default: 300)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--dataset",
        default=RANDOM,
        metavar="NAME|FILE",
        help=f"{RANDOM} (default); {PREFIX}: random ones after shared beginnings; or a file: ShareGPT's JSON, or "
        'lines of {"prompt": TEXT}',
    )
    add("--chat", action="store_true", help="ask /v1/chat/completions, with texts")
    add("--text", action="store_true", help="send random prompts as texts, where a server takes no token ids")
    add("--token-ids", type=_ids, default=(100, 999), metavar="A-B", help="of random prompts (default: 100-999)")
    add("--prompt-tokens", type=_count, default=256, metavar="N", help="mean length of random prompts (default: 256)")
    add("--output-tokens", type=_count, default=None, metavar="N", help="of an answer (default: 128, or the file's)")
    add("--spread", type=float, default=0.0, metavar="S", help="0: equal lengths; 0.5: half to one and a half the mean")
    add("--prefix-tokens", type=_count, default=512, metavar="N", help="length of shared beginnings (default: 512)")
    add("--prefixes", type=_count, default=4, metavar="N", help="number of shared beginnings (default: 4)")
    add("--ignore-eos", action="store_true", help="answers as long as asked for: a field that not every server takes")
    add("--body", type=_fields, default={}, metavar="JSON", help="further fields of each request")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals; each load takes the next one")


def _bench(options: argparse.Namespace) -> int:
    from deploy.bench.command import bench

    if options.api_key:
        setproctitle.setproctitle("tokenyard bench (arguments hidden: they had a key)")
    return bench(options)


def _plot(options: argparse.Namespace) -> int:
    from deploy.bench.command import plot

    return plot(options)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _ids(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"must be the first and the last id, such as 100-999, got {text}")
    return int(first), int(last)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return found
