"""`python -m tests.model_worker.tensor_parallel.rank FOLDER RANK`: a rank of one group after another.

Each line of the standard input names a group, the number of its ranks, and its model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from model_worker.runner import ModelRunner
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.links import Follower, Place
from model_worker.tensor_parallel.load import load_part
from model_worker.tensor_parallel.passes import follow

SECONDS = 120.0


def place(folder: Path, name: str, rank: int, ranks: int) -> Place:
    return Place(folder / f"{name}.sock", rank, ranks, 0, {})


def be_a_rank(where: Place, model: str) -> None:
    link = Follower(where, SECONDS)
    loaded = load_part(model, "float32", where.ranks, link.exchange, lambda *_: None)
    terms = link.receive(SECONDS)
    assert terms is not None
    runner = ModelRunner(loaded, **json.loads(terms))
    follow(runner.backend, lambda: link.receive(SECONDS) or b"")


def main() -> None:
    folder, rank = sys.argv[1:]
    for line in sys.stdin:
        name, ranks, model = line.rstrip("\n").split(" ", 2)
        try:
            be_a_rank(place(Path(folder), name, int(rank), int(ranks)), model)
        except GroupLost:
            continue


if __name__ == "__main__":
    main()
