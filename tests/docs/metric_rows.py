"""The rows of the tables in docs/metrics.md, made from the code: `python -m tests.docs.metric_rows` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from api_server.accounts.ledger import Use
from api_server.metrics.collector import Metrics
from api_server.metrics.usage import key_families
from interfaces.messages import Status, WorkerStatus
from shared.process_table import ProcessState


def families() -> list[Metric]:
    """All families of a server whose scheduler, workers and keys have something to show."""
    worker = WorkerStatus("cpu", 0, 1, 2, 100, blocks_used=30, blocks_cached=5, steps=40, seconds_since_step=1)
    worker = replace(worker, drafts=1, drafted=1, accepted=1, accepted_at=[1])
    counters = dict.fromkeys(("placed_tokens", "saved_tokens", "preemptions"), 1)
    status = Status(9, True, "", [worker], 7, 5, 4096, 128, 16, 32000, counters)
    keys = key_families([Use("key", "model")])
    text = Metrics("model", ["/generate"]).exposition(status, processes={"scheduler": ProcessState()}, further=keys)
    return list(text_string_to_metric_families(text.decode()))


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Name, type, meaning, and the names that others have for the same. Counts of the scheduler have no row each."""
    found = families()
    others: dict[str, list[str]] = {}
    for family in found:
        if family.documentation.startswith("As "):
            others.setdefault(family.documentation.removeprefix("As "), []).append(_shown(family))
    for family in found:
        if _is_ours(family):
            yield _shown(family), family.type, family.documentation, ", ".join(sorted(others.get(family.name, [])))


def _is_ours(family: Metric) -> bool:
    """False for other servers' names, times of creation, and the counts of the scheduler."""
    ours = family.name.startswith("tokenyard_") and not family.name.endswith("_created")
    return ours and not family.documentation.startswith("Counter '")


def _shown(family: Metric) -> str:
    return f"`{family.name}{'_total' if family.type == 'counter' else ''}`"


def lines() -> list[str]:
    """The rows as they stand in the page."""
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows()]


if __name__ == "__main__":
    print("\n".join(lines()))
