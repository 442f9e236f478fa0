"""Scrape-time facts: the scheduler's, from its last `Status`, and the supervisor's about the processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from api_server.engine.client import STALE_SECONDS
from interfaces import EPOCHS_OF_A_SUPERVISOR, AdapterState, Status
from shared.process_table import ProcessState

_WORKER_LABELS = ["device", "index"]

# The scheduler's counts of sizes: `NAME<=BOUND` of those in a bucket by powers of two, and `NAME<=` of their sum.
_SIZE = re.compile(r"(\w+)<=(\d*)")
_SIZE_BOUNDS = [1 << power for power in range(15)]


class ModelState(NamedTuple):
    """What was last heard from the scheduler of a model, and how many seconds ago."""

    name: str
    status: Status | None
    silence: float


def facts_of_models(models: Sequence[ModelState], draining: bool) -> list[Metric]:
    """Return the facts of each model's scheduler. Where a server has several models, the label `model` names each."""
    if len(models) == 1:
        return scheduler_facts(models[0].status, models[0].silence, draining)
    families: dict[str, Metric] = {}
    for model in models:
        for family in scheduler_facts(model.status, model.silence, draining):
            joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                joined.add_sample(sample.name, {"model": model.name, **sample.labels}, sample.value)
    return list(families.values())


def scheduler_facts(status: Status | None, silence: float, draining: bool) -> list[Metric]:
    """Facts of the last `Status`. When that is too old, gauges of a past state are left out; ages go on."""
    fresh = status is not None and silence <= STALE_SECONDS
    ready = GaugeMetricFamily("tokenyard_scheduler_ready", "1 while the scheduler accepts work")
    ready.add_metric([], float(status is not None and status.ready and fresh and not draining))
    silent = GaugeMetricFamily("tokenyard_scheduler_silent_seconds", "Since the scheduler was heard", value=silence)
    if status is None:
        return [ready, silent]
    lasting = [ready, silent, *_worker_counters(status), *_image_counters(status), *_scheduler_counters(status)]
    if not fresh:
        return [*lasting, _worker_ages(status, silence)]
    lasting += _adapter_gauges(status)
    running = GaugeMetricFamily("tokenyard_requests_running", "Sequences in the batches", value=status.running)
    waiting = GaugeMetricFamily("tokenyard_requests_waiting", "Sequences that wait for room", value=status.waiting)
    backlog = GaugeMetricFamily(
        "tokenyard_backlog_seconds", "Measured time of the prompts and requests that wait", value=status.backlog_seconds
    )
    block = GaugeMetricFamily("tokenyard_kv_block_size", "Tokens in one KV block", value=status.block_size)
    return [*lasting, running, waiting, backlog, block, _worker_ages(status, 0.0), *_worker_gauges(status)]


def process_facts(processes: Mapping[str, ProcessState]) -> Iterator[Metric]:
    """The supervisor's facts about all processes of this server."""
    silent = GaugeMetricFamily(
        "tokenyard_process_silent_seconds", "Since a process was heard that hangs; 0 for the others", labels=["process"]
    )
    hangs = CounterMetricFamily("tokenyard_process_hangs", "Times a process hung and was killed", labels=["process"])
    for name, state in processes.items():
        silent.add_metric([name], state.seconds_silent)
        hangs.add_metric([name], state.hangs)
    yield from (silent, hangs)


def _worker_ages(status: Status, silence: float) -> Metric:
    age = GaugeMetricFamily(
        "tokenyard_worker_seconds_since_step", "Age of the last completed step", labels=_WORKER_LABELS
    )
    for worker in status.workers:
        age.add_metric([worker.device, str(worker.index)], worker.seconds_since_step + silence)
    return age


def _worker_gauges(status: Status) -> Iterator[Metric]:
    labels = _WORKER_LABELS
    running = GaugeMetricFamily("tokenyard_worker_running", "Sequences on one worker", labels=labels)
    blocks = GaugeMetricFamily("tokenyard_kv_blocks", "KV blocks by state", labels=[*labels, "state"])
    for worker in status.workers:
        names = [worker.device, str(worker.index)]
        running.add_metric(names, worker.running)
        blocks.add_metric([*names, "total"], worker.blocks_total)
        blocks.add_metric([*names, "used"], worker.blocks_used)
        blocks.add_metric([*names, "cached"], worker.blocks_cached)
    yield from (running, blocks, _spill_gauge(status))


def _spill_gauge(status: Status) -> Metric:
    beside = GaugeMetricFamily(
        "tokenyard_kv_spill_blocks",
        "Places for blocks beside the KV cache (kv_spill)",
        labels=[*_WORKER_LABELS, "state"],
    )
    for worker in status.workers:
        names = [worker.device, str(worker.index)]
        beside.add_metric([*names, "total"], worker.spill_slots)
        beside.add_metric([*names, "used"], worker.spill_used)
    return beside


def _adapter_gauges(status: Status) -> Iterator[Metric]:
    """Gauges of the adapters that take requests."""
    ready = GaugeMetricFamily("tokenyard_adapter_ready", "1 for an adapter that takes requests", labels=["adapter"])
    users = GaugeMetricFamily("tokenyard_adapter_requests", "Open requests of an adapter", labels=["adapter"])
    held = GaugeMetricFamily("tokenyard_adapter_workers", "Workers with the adapter in memory", labels=["adapter"])
    for adapter in status.adapters:
        if adapter.state == AdapterState.READY:
            ready.add_metric([adapter.name], 1)
            users.add_metric([adapter.name], adapter.requests)
            held.add_metric([adapter.name], adapter.workers)
    yield from (ready, users, held)


def _worker_counters(status: Status) -> Iterator[Metric]:
    labels = _WORKER_LABELS
    steps = CounterMetricFamily("tokenyard_worker_steps", "Forward passes", labels=labels)
    starts = CounterMetricFamily("tokenyard_worker_starts", "Times the worker's slot was started", labels=labels)
    drafted = CounterMetricFamily("tokenyard_worker_draft_tokens", "Tokens that were guessed", labels=labels)
    accepted = CounterMetricFamily("tokenyard_worker_accepted_tokens", "Tokens that were guessed right", labels=labels)
    placed = CounterMetricFamily("tokenyard_worker_placed_tokens", "Tokens of sequences placed here", labels=labels)
    saved = CounterMetricFamily("tokenyard_worker_saved_tokens", "Those of them that were cached", labels=labels)
    for worker in status.workers:
        names = [worker.device, str(worker.index)]
        placed.add_metric(names, worker.placed_tokens)
        saved.add_metric(names, worker.saved_tokens)
        steps.add_metric(names, worker.steps)
        starts.add_metric(names, worker.epoch % EPOCHS_OF_A_SUPERVISOR)
        drafted.add_metric(names, worker.drafted)
        accepted.add_metric(names, worker.accepted)
    yield from (steps, starts, drafted, accepted, placed, saved)
    yield from _spill_counters(status)
    yield from _guess_counters(status)


def _spill_counters(status: Status) -> Iterator[Metric]:
    labels = _WORKER_LABELS
    spilled = CounterMetricFamily("tokenyard_worker_spilled_blocks", "Blocks that went to kv_spill", labels=labels)
    loaded = CounterMetricFamily("tokenyard_worker_loaded_tokens", "Tokens that came back from kv_spill", labels=labels)
    for worker in status.workers:
        names = [worker.device, str(worker.index)]
        spilled.add_metric(names, worker.spilled_blocks)
        loaded.add_metric(names, worker.loaded_tokens)
    yield from (spilled, loaded)


def _guess_counters(status: Status) -> Iterator[Metric]:
    labels = _WORKER_LABELS
    drafts = CounterMetricFamily("tokenyard_worker_drafts", "Sequences in passes that had guesses", labels=labels)
    at = CounterMetricFamily(
        "tokenyard_worker_accepted_tokens_per_pos", "Right guesses by position", labels=[*labels, "position"]
    )
    for worker in status.workers:
        names = [worker.device, str(worker.index)]
        drafts.add_metric(names, worker.drafts)
        for position, count in enumerate(worker.accepted_at):
            at.add_metric([*names, str(position)], count)
    yield from (drafts, at)


def _image_counters(status: Status) -> Iterator[Metric]:
    labels = _WORKER_LABELS
    encoded = CounterMetricFamily("tokenyard_encoded_images", "Images that a worker encoded", labels=labels)
    hits = CounterMetricFamily("tokenyard_encoder_cache_hits", "Images whose features were kept", labels=labels)
    seconds = CounterMetricFamily("tokenyard_image_encode_seconds", "Time of encoding images", labels=labels)
    for worker in status.workers:
        names = [worker.device, str(worker.index)]
        encoded.add_metric(names, worker.encoded)
        hits.add_metric(names, worker.image_hits)
        seconds.add_metric(names, worker.encode_ms / 1000)
    yield from (encoded, hits, seconds)


def _scheduler_counters(status: Status) -> Iterator[Metric]:
    yield from _scheduler_sizes(status.counters)
    for name, value in sorted(status.counters.items()):
        if _SIZE.fullmatch(name):
            continue
        plain = re.sub(r"[^a-z0-9_]", "_", name.lower()).removesuffix("_total")
        amount: float = value
        if plain.endswith("_ms"):
            # Prometheus wants seconds.
            plain = f"{plain.removesuffix('_ms')}_seconds"
            amount = value / 1000
        yield CounterMetricFamily(f"tokenyard_scheduler_{plain}", f"Counter {name!r} of the scheduler", value=amount)


def _scheduler_sizes(counters: Mapping[str, int]) -> Iterator[Metric]:
    found = [match for match in map(_SIZE.fullmatch, counters) if match is not None]
    for name in sorted({match[1] for match in found}):
        counts = {int(match[2]): counters[match[0]] for match in found if match[1] == name and match[2]}
        within = [sum(count for size, count in counts.items() if size <= bound) for bound in _SIZE_BOUNDS]
        buckets = [(str(float(bound)), count) for bound, count in zip(_SIZE_BOUNDS, within, strict=True)]
        yield HistogramMetricFamily(
            f"tokenyard_scheduler_{name}",
            f"Sizes {name!r} of the scheduler",
            buckets=[*buckets, ("+Inf", sum(counts.values()))],
            sum_value=counters.get(f"{name}<=", 0),
        )
