"""`python -m tests.system.kept_server serve MODEL ...`: CPU workers as those of GPUs whose weights a keeper has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deploy import cli, processes, serve
from deploy.child import ChildSpec

WORKER = "tests.system.kept_worker"
KEEPER = "tests.system.kept_keeper"


def main() -> int:
    plain = processes.child_specs

    def specs(settings: Any, directory: Any, *listeners: int) -> list[ChildSpec]:
        return [spec for one in plain(settings, directory, *listeners) for spec in kept(one, directory)]

    serve.child_specs = specs  # type: ignore[attr-defined]
    return cli.main(sys.argv[1:])


def kept(spec: ChildSpec, directory: Any) -> Iterator[ChildSpec]:
    if spec.role != "model_worker":
        yield spec
        return
    keeper = processes.keeper_spec("0", directory, 0, "cpu", spec.env)
    yield replace(keeper, argv=[KEEPER if word == "model_worker.keeper" else word for word in keeper.argv])
    yield replace(spec, argv=[*(WORKER if word == "model_worker" else word for word in spec.argv), "--keeper"])


if __name__ == "__main__":
    sys.exit(main())
