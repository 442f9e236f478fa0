"""`python -m benchmarks.peers`: which peers there are; installs them; starts one by hand, as a comparison would."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.encoder_words import ENCODERS
from benchmarks.peers import known_peers
from benchmarks.peers.peer import Peer, PeerError
from benchmarks.places import default_cache, standard_model_in
from benchmarks.standard_model import SIZES
from benchmarks.standard_work import STANDARD_WORK, Needs


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    peers = known_peers(options.cache)
    if options.peer and options.peer not in peers:
        print(f"peers: {options.peer!r} is not one of {', '.join(peers)}", file=sys.stderr)
        return 1
    try:
        if options.action == "list":
            for peer in peers.values():
                print(f"{peer.name} {peer.version}: {'installed in' if peer.installed else 'not in'} {peer.home}")
        elif options.action == "install":
            _install(peers[options.peer], options.cache)
        else:
            _start(peers[options.peer], options)
    except PeerError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    return 0


def _install(peer: Peer, cache: Path) -> None:
    """With the models, so that a comparison finds everything done."""
    peer.install()
    for size in ENCODERS if peer.embeds else SIZES:
        peer.prepared(standard_model_in(cache, size))
    print(f"{peer.name} {peer.version} is installed in {peer.home}")


def _start(peer: Peer, options: argparse.Namespace) -> None:
    if not peer.installed:
        raise PeerError(f"{peer.name} is not installed: python -m benchmarks.peers install {peer.name}")
    size = options.model or ("encoder-22m" if peer.embeds else "135m")
    if (size in ENCODERS) != peer.embeds:
        raise PeerError(f"{peer.name} takes one of {', '.join(ENCODERS if peer.embeds else SIZES)}, got --model {size}")
    works = [work for work in STANDARD_WORK.values() if work.embeds == peer.embeds]
    model = peer.prepared(standard_model_in(options.cache, size))
    start = peer.start(model, options.port, Needs.of(works, options.threads))
    os.execvpe(start.command[0], start.command, {**os.environ, **start.environment})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(peer="")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the peers and models")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="what there is, and what is installed")
    actions.add_parser("install", help="install a peer and convert the models for it").add_argument("peer")
    start = actions.add_parser("start", help="serve a standard model in the foreground")
    start.add_argument("peer")
    start.add_argument("--model", choices=sorted({*SIZES, *ENCODERS}), help="135m, or encoder-22m for vectors")
    start.add_argument("--port", type=int, default=9000)
    start.add_argument("--threads", type=int, default=os.cpu_count())
    return parser


if __name__ == "__main__":
    sys.exit(main())
