"""Puts waiting requests on workers, and says which requests no worker can run.

`placement_cost.py` has the policy. Everything here is a constraint that holds for any policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from interfaces import GENERATE, ErrorCode, Finish, PoolingContext, PoolingTask, RequestError, Stage, TextContext
from scheduler import background
from scheduler.inline_arrays import MOST_INLINE_BYTES, array_bytes, map_arrays
from scheduler.limits import Limits
from scheduler.open_requests import OpenRequests
from scheduler.placement_cost import Choice, Policy, choice_of
from scheduler.sequence import Sequence
from scheduler.waiting_queue import refusal
from scheduler.workers import Worker

# Tasks whose values are vectors, which can be cut to fewer dimensions.
_VECTOR_TASKS = (PoolingTask.EMBED, PoolingTask.EMBED_TOKENS)
# Tasks of a codec beside a model that generates speech tokens.
_OF_CODECS = (PoolingTask.DECODE_SPEECH, PoolingTask.ENCODE_SPEECH)


def doing(task: str, workers: Iterable[Worker]) -> list[Worker]:
    """The workers that have a task."""
    return [worker for worker in workers if task in worker.hello.tasks]


def tasks(workers: Iterable[Worker]) -> list[str]:
    """What some worker can do."""
    return sorted({task for worker in workers for task in worker.hello.tasks})


def max_model_len(workers: Collection[Worker], wanted: int | None) -> int:
    """Length of the longest sequence that every worker can hold, at most `wanted`; 0 without workers."""
    lengths = [worker.hello.max_model_len for worker in workers]
    return min([*lengths, wanted] if wanted else lengths) if lengths else 0


def vocab_size(workers: Iterable[Worker]) -> int:
    return min((worker.hello.vocab_size for worker in workers), default=0)


def hidden_size(workers: Iterable[Worker]) -> int:
    return min((worker.hello.hidden_size for worker in workers), default=0)


def processors(workers: Collection[Worker]) -> dict[str, str]:
    """The logits processors that all workers have: the schemas of their parameters, by name."""
    first, *others = [worker.hello.processors for worker in workers] or [{}]
    return {name: schema for name, schema in first.items() if all(name in other for other in others)}


def misfit(context: TextContext, workers: Collection[Worker], wanted: int | None) -> RequestError | None:
    """Why these workers can never run a request, or None. `wanted` is the operator's bound for its length."""
    generating = doing(GENERATE, workers)
    if not generating:
        return _no_worker(GENERATE, workers)
    workers = generating
    ranks = max(worker.hello.ranks for worker in workers)
    if context.prompt_embeddings is not None and ranks > 1:
        text = f"embeddings are not taken by a group of ranks (tensor_parallel {ranks}): send tokens or text"
        return RequestError(ErrorCode.INVALID, text)
    takes_images = all(worker.hello.images for worker in workers)
    return refusal(context, max_model_len(workers, wanted), vocab_size(workers), hidden_size(workers), takes_images)


def text_misfit(context: PoolingContext, workers: Collection[Worker], wanted: int | None) -> RequestError | None:
    """Why these workers can never compute the texts of a request, or None. `wanted` is as in `misfit`.

    The API checks the same before it submits. Another sender of messages may not have checked.
    """
    able = doing(context.task, workers)
    if not able:
        return _no_worker(context.task, workers)
    longest = int(context.lengths.max())
    most = max_model_len(able, wanted)
    # Windows of codes and clips may be longer than the model's own texts.
    if longest > most and context.task not in _OF_CODECS:
        text = f"text {int(context.lengths.argmax())} has {longest} tokens; a text may have {most}"
        return RequestError(ErrorCode.TOO_LONG, text)
    known = vocab_size(able)
    if context.tokens.max() >= known:
        return RequestError(ErrorCode.INVALID, f"token ids must be between 0 and {known - 1}")
    width = hidden_size(able)
    if context.dimensions is not None and context.task in _VECTOR_TASKS and context.dimensions > width:
        text = f"dimensions must be at most {width}, the width of this model's vectors, got {context.dimensions}"
        return RequestError(ErrorCode.INVALID, text)
    return None


def _no_worker(task: str, workers: Iterable[Worker]) -> RequestError:
    can = ", ".join(tasks(workers))
    return RequestError(ErrorCode.INVALID, f"no model worker here can {task}: they can {can}")


def place_waiting(requests: OpenRequests, limits: Limits, policy: Policy, only_returning: bool) -> None:
    """Put the requests of the queue on workers, in their order, as long as there is room."""
    _requeue_orphans(requests)
    requests.waiting.take_while(lambda sequence: place(requests, limits, policy, sequence), only_returning)


def place(requests: OpenRequests, limits: Limits, policy: Policy, sequence: Sequence) -> bool:
    """Put the next sequence of the queue on the best worker that has room. False if none has.

    Ends the sequence instead if no worker can run it, or if nothing is left to compute.
    """
    workers = requests.workers.values()
    if not workers:
        return False
    if not sequence.checked:
        error = misfit(sequence.context, workers, limits.max_model_len)
        if error is not None:
            requests.refuse_queued(sequence, error)
            return True
        sequence.checked = True
    limit = limit_of(sequence, requests, limits)
    if len(sequence.tokens) >= limit:
        requests.end_queued(sequence, Finish.LENGTH)
        return True
    quarantine = requests.quarantine
    isolated = quarantine.is_isolated(sequence)
    error = adapter_problem(sequence, workers) or _size_problem(sequence, workers)
    if error is not None:
        requests.refuse_queued(sequence, error)
        return True
    while not _put(requests, limits, policy, sequence, limit, isolated):
        able = [worker for worker in doing(GENERATE, workers) if could_take(worker, requests, sequence)]
        yielding = None if sequence.background else background.take_one(able)
        if yielding is None:
            return False
        requests.preempt(yielding, f"request {sequence.context.request_id} wanted its place")
    return True


def limit_of(sequence: Sequence, requests: OpenRequests, limits: Limits) -> int:
    """Length in tokens, prompt included, at which a sequence ends if it is placed now, on any worker."""
    generating = doing(GENERATE, requests.workers.values())
    return sequence.limit(max_model_len(generating, limits.max_model_len))


def place_on(worker: Worker, requests: OpenRequests, limits: Limits, sequence: Sequence, why: str) -> bool:
    """Put a sequence that runs nowhere on this worker, and tell why. False if it has no room or its limit is reached.

    The sequence has no images, and need not run isolated.
    """
    limit = limit_of(sequence, requests, limits)
    if len(sequence.tokens) >= limit or not could_take(worker, requests, sequence):
        return False
    choice = choice_of(worker, sequence)
    replica = requests.replicas.number_of(sequence)
    if not worker.place(sequence, replica, limit, spare=worker.rows.running):
        return False
    requests.record(sequence, why, Stage.QUEUED)
    _record_placement(requests, choice, [], sequence, isolated=False)
    return True


def _put(
    requests: OpenRequests, limits: Limits, policy: Policy, sequence: Sequence, limit: int, isolated: bool
) -> bool:
    """Put a sequence on the best worker that has room, or refuse it. False if none has."""
    workers = requests.workers.values()
    replica = requests.replicas.number_of(sequence)
    able = [worker for worker in doing(GENERATE, workers) if _takes(worker, requests, sequence, isolated)]
    most = max((limits.step_tokens(worker.hello) for worker in able), default=0)
    choices = policy(able, sequence, most)
    for i, choice in enumerate(choices):
        if choice.worker.remote and (problem := map_arrays(sequence)):
            requests.refuse_queued(sequence, RequestError(ErrorCode.FAILED, problem))
            return True
        if choice.worker.place(sequence, replica, limit, spare=choice.worker.rows.running):
            _record_placement(requests, choice, [*choices[:i], *choices[i + 1 :]], sequence, isolated)
            return True
    return False


def _takes(worker: Worker, requests: OpenRequests, sequence: Sequence, isolated: bool) -> bool:
    """Whether a worker that has room for a sequence may run it now."""
    shared = worker.rows.running or len(worker.beside)
    if worker.rows.full or (isolated and shared) or not background.may_join(sequence, worker):
        return False
    return could_take(worker, requests, sequence)


def could_take(worker: Worker, requests: OpenRequests, sequence: Sequence) -> bool:
    """Whether a worker may run a sequence once it has room."""
    if not worker.weights.ready or worker.leaving:
        return False
    if sequence.adapter is not None and worker.adapters.problem(sequence.adapter):
        return False
    if worker.remote and sequence.images and array_bytes([sequence, *worker.changes.joined]) > MOST_INLINE_BYTES:
        return False
    return not requests.quarantine.any_isolated(worker.rows.sequences)


def _requeue_orphans(requests: OpenRequests) -> None:
    """Put sequences back into the queue whose beginning does not come: another row has ended early, or a load hangs."""
    for worker in requests.workers.values():
        for sequence in worker.take_orphans():
            story = "its beginning comes neither by another request nor by a load: it looks for a place again"
            requests.record(sequence, story, Stage.QUEUED)
            requests.waiting.add(sequence)


def adapter_problem(sequence: Sequence, workers: Iterable[Worker]) -> RequestError | None:
    """Why no worker can run a sequence with its adapter, or None."""
    if sequence.adapter is None:
        return None
    problems = [worker.adapters.problem(sequence.adapter) for worker in doing(GENERATE, workers)]
    return RequestError(ErrorCode.FAILED, problems[0]) if problems and all(problems) else None


def _size_problem(sequence: Sequence, workers: Iterable[Worker]) -> RequestError | None:
    """Why the images of a sequence are too large for every worker, or None."""
    if not sequence.images or not all(worker.remote for worker in doing(GENERATE, workers)):
        return None
    size = array_bytes([sequence])
    if size <= MOST_INLINE_BYTES:
        return None
    text = f"the images take {size} bytes, and workers of other machines are sent {MOST_INLINE_BYTES} at most"
    return RequestError(ErrorCode.TOO_LONG, f"{text}: send fewer or smaller images")


def _record_placement(
    requests: OpenRequests, choice: Choice, others: Items[Choice], sequence: Sequence, isolated: bool
) -> None:
    worker = choice.worker
    sequence.admitted = True
    cached = int(worker.rows.num_computed_tokens[sequence.row])
    awaited = max(0, int(worker.rows.awaited[sequence.row]) - cached)
    requests.waiting.charge(sequence, len(sequence.tokens) - cached - awaited)
    alone = ", alone: two workers crashed with it" if isolated else ""
    alone += "; it waits until its adapter is read" if worker.rows.awaits_adapter[sequence.row] else ""
    requests.record(
        sequence,
        f"admitted to worker {worker.hello.index} (epoch {worker.hello.epoch}), row {sequence.row}; "
        f"{cached} of {len(sequence.tokens)} tokens were cached"
        f"{_coming(worker, sequence, awaited) if awaited else ''}"
        f"{_comparison(choice, others)}{alone}",
        Stage.PLACED,
        worker.hello.index,
    )


def _coming(worker: Worker, sequence: Sequence, awaited: int) -> str:
    """Where the `awaited` tokens come from that a row waits for, in words."""
    load = worker.spilled_rows.load_of(sequence.row)
    if load is not None:
        return f", {awaited} more are loaded from {worker.hello.spill_place}{_times(load.seconds, load.computing)}"
    arrival = worker.arrivals.arrival_of(sequence.row)
    if arrival is None:
        return f", {awaited} more are being computed for another request"
    own = arrival.tokens - arrival.first * worker.block_size
    others = f", {awaited - own} more are sent for another request" if awaited > own else ""
    return f"{others}, {own} more are sent by worker {arrival.source.index}{_times(arrival.seconds, arrival.computing)}"


def _times(seconds: float | None, computing: float | None) -> str:
    """The expected time of a copy beside that of computing, as far as both were measured."""
    if seconds is None or computing is None:
        return ""
    return f" (about {seconds * 1e3:.0f} ms; computing them takes {computing * 1e3:.0f} ms)"


def _comparison(choice: Choice, others: Items[Choice]) -> str:
    """The reason for a choice in words; empty where there was none."""
    if not others:
        return ""
    matched = max(other.match for other in others)
    backlogs = ", ".join(f"{other.backlog} on worker {other.worker.hello.index}" for other in others[:4])
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return (
        f"; its cost was {choice.new_tokens} tokens to compute and a backlog of {choice.backlog}; "
        f"other workers had at most {matched} of its tokens, and a backlog of {backlogs}{more}"
    )
