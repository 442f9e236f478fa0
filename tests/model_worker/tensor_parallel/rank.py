"""`python -m tests.model_worker.tensor_parallel.rank FOLDER RANK`: a rank of one group after another.

Each line of the standard input names a group, the number of its ranks, its model, and whether its ranks are joined by
torch.distributed, as they are on GPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import distributed as dist

from model_worker.runner import ModelRunner
from model_worker.tensor_parallel.collectives import Collectives
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.links import Follower, Place
from model_worker.tensor_parallel.load import load_part
from model_worker.tensor_parallel.passes import follow

SECONDS = 120.0


def place(folder: Path, name: str, rank: int, ranks: int) -> Place:
    return Place(folder / f"{name}.sock", rank, ranks, 0, {})


@contextmanager
def collectives(where: Place) -> Iterator[Collectives]:
    """As ranks on GPUs are joined, but on a CPU."""
    try:
        yield Collectives(where.rank, where.ranks, torch.device("cpu"), where.path.with_suffix(".meeting"))
    finally:
        dist.destroy_process_group()


def be_a_rank(where: Place, model: str, distributed: bool) -> None:
    link = Follower(where, SECONDS)
    with collectives(where) if distributed else nullcontext() as joining:
        loaded = load_part(model, "float32", where.ranks, joining or link.exchange, lambda *_: None)
        terms = link.receive(SECONDS)
        assert terms is not None
        runner = ModelRunner(loaded, **json.loads(terms))
        follow(runner.backend, lambda: link.receive(SECONDS) or b"", joining)


def main() -> None:
    folder, rank = sys.argv[1:]
    for line in sys.stdin:
        name, ranks, distributed, model = line.rstrip("\n").split(" ", 3)
        try:
            be_a_rank(place(Path(folder), name, int(rank), int(ranks)), model, distributed == "True")
        except GroupLost:
            continue


if __name__ == "__main__":
    main()
