"""What the scheduler says about itself and its workers, for `/ready`, `/metrics` and the API's checks of requests."""

from __future__ import annotations

from interfaces import GENERATE, NO_IMAGES, Status, WorkerStatus
from scheduler import placement
from scheduler.adapter_registry import AdapterRegistry
from scheduler.limits import Limits
from scheduler.oneshot import OneShotLane
from scheduler.open_requests import OpenRequests
from scheduler.weights_registry import WeightsRegistry
from scheduler.workers import Worker


def status_of(
    incarnation: int,
    requests: OpenRequests,
    limits: Limits,
    oneshot: OneShotLane,
    adapters: AdapterRegistry,
    weights: WeightsRegistry,
    backlog_seconds: float,
) -> Status:
    """Read what the parts of the scheduler know."""
    everyone = requests.workers.values()
    generating = placement.doing(GENERATE, everyone)
    workers = generating or everyone
    pooling = [worker for worker in everyone if worker.pools]
    reason = _why_not_ready(requests, adapters, weights)
    return Status(
        incarnation=incarnation,
        ready=not reason,
        reason=reason,
        workers=[_worker_status(worker, limits) for worker in everyone],
        waiting=len(requests.waiting) + oneshot.waiting,
        running=requests.running + oneshot.running,
        max_model_len=placement.max_model_len(workers, limits.max_model_len),
        max_running=sum(len(worker.rows.sequences) for worker in workers),
        block_size=min((worker.block_size for worker in workers), default=0),
        vocab_size=placement.vocab_size(workers),
        counters={**requests.counted(), "adapter_evictions": adapters.evictions},
        hidden_size=placement.hidden_size(workers),
        tasks=placement.tasks(everyone),
        vector_width=placement.hidden_size(pooling),
        labels=next((worker.hello.labels for worker in pooling if worker.hello.labels), []),
        codec=next((worker.hello.codec for worker in pooling if worker.hello.codec), None),
        images=min((worker.hello.images for worker in generating), default=NO_IMAGES),
        adapters=adapters.status(),
        takes_adapters=any(worker.adapters.takes_any for worker in everyone),
        processors=placement.processors(generating),
        paused=weights.paused,
        weights=weights.status(),
        backlog_seconds=backlog_seconds,
    )


def _why_not_ready(requests: OpenRequests, adapters: AdapterRegistry, weights: WeightsRegistry) -> str:
    if not requests.workers:
        return "no model worker is ready yet"
    if adapters.starting:
        return "the adapters of the setting lora are being loaded"
    return weights.standstill


def _worker_status(worker: Worker, limits: Limits) -> WorkerStatus:
    hello = worker.hello
    waits = [wait[0] for wait in (worker.in_flight.waited(), worker.batches.waited()) if wait is not None]
    spill = worker.spill
    return WorkerStatus(
        device=hello.device,
        index=hello.index,
        epoch=hello.epoch,
        running=worker.rows.running + worker.batches.requests + worker.beside.requests,
        blocks_total=worker.pool.num_blocks,
        blocks_used=worker.pool.used,
        blocks_cached=worker.pool.cached,
        steps=worker.in_flight.answered + worker.batches.answered + worker.beside.answered,
        seconds_since_step=min(waits, default=0.0),
        drafted=hello.drafted,
        accepted=hello.accepted,
        drafts=hello.drafts,
        accepted_at=hello.accepted_at,
        encoded=hello.encoded,
        image_hits=hello.image_hits,
        encode_ms=hello.encode_ms,
        backend=hello.backend,
        tasks=hello.tasks,
        placed_tokens=worker.beginnings.placed_tokens,
        saved_tokens=worker.beginnings.saved_tokens,
        spill_slots=spill.slots,
        spill_used=spill.used,
        spilled_blocks=spill.saved,
        loaded_tokens=spill.loaded * worker.block_size,
        max_rows=len(worker.rows.sequences),
        step_tokens=limits.step_tokens(hello),
        text_tokens=limits.text_batch_tokens(hello.device) if worker.pools else 0,
    )
