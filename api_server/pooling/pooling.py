"""Values of texts from the model: the one path that every dialect's one-shot requests take.

Knows contexts, limits of the model, metrics and time; knows neither text nor dialects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from api_server.answers.observer import receiving
from api_server.answers.one_shot import OneShot
from api_server.engine import scheduling
from api_server.engine.model_facts import ModelFacts
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.pooling.reading import Item, Reading, read_texts, route_of
from api_server.pooling.report import Report
from api_server.state import ServerState
from api_server.text.pooled_model import IN_WORDS, ROUTES_OF_TASK
from api_server.text.text_batches import TextBatch
from api_server.web.endpoint import Call
from interfaces import AdapterStatus, PooledValues, PoolingContext, PoolingTask, RequestID

# Most numbers of one answer with values of each token: 128 MB as float32, and about three times that as JSON.
MOST_NUMBERS = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request wants of its texts."""

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool = True
    activate: bool = True
    # The kind of its texts, where the model has modules for each kind.
    route: str = ""


@dataclass(frozen=True)
class Pooled:
    """The values of a request's texts, and its tokens."""

    values: PooledValues
    batch: TextBatch

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return len(self.batch.tokens)

    @property
    def rows(self) -> NDArray[np.float32]:
        """The values of a task with one row for each text: f32[texts, width]."""
        return self.values.array


async def pool_texts(call: Call, items: Sequence[Item], reading: Reading, ask: Ask) -> Pooled:
    """Tokenizes texts and has the model compute them. Raises RequestFailed."""
    with begin(call, ask):
        batch = await read_texts(call.server, items, reading)
    return await pool(call, batch, replace(ask, route=route_of(call.server, reading)))


@contextmanager
def begin(call: Call, ask: Ask) -> Iterator[None]:
    """The texts must be tokenized within it. Raises RequestFailed for what the served model cannot do."""
    call.server.check_family(True)
    with receiving(call.server.observers, call.path):
        _check_task(call.server, ask)
        yield


def _check_task(server: ServerState, ask: Ask) -> None:
    facts = server.engine.model
    if facts.tasks and ask.task not in facts.tasks:
        raise other_task(server, ask.task)
    width = facts.vector_width
    if ask.dimensions is not None and width and ask.dimensions > width:
        raise invalid(
            f"dimensions must be at most {width}, the width of this model's vectors, got {ask.dimensions}", "dimensions"
        )


async def pool(call: Call, batch: TextBatch, ask: Ask) -> Pooled:
    """Has the model compute texts. Raises RequestFailed; the work ends when the client leaves."""
    server = call.server
    _check_size(server.engine.model, len(batch.tokens), ask)
    adapter = _adapter(call)
    model = server.model_name if adapter is None else adapter.name
    context = PoolingContext(
        tokens=batch.tokens,
        lengths=batch.lengths,
        token_types=batch.token_types,
        task=ask.task,
        dimensions=ask.dimensions,
        normalize=ask.normalize,
        activate=ask.activate,
        request_id=RequestID(call.request_id),
        model_name=server.model_name,
        route=ask.route,
        adapter="" if adapter is None else adapter.name,
        adapter_digest="" if adapter is None else adapter.digest,
    )
    shot = OneShot(call.path, call.received, len(batch.lengths), len(batch.tokens), call.caller.name, model)
    report = Report(server, shot)
    try:
        values = await server.engine.pool(context, scheduling.current.get())
    except RequestFailed as error:
        report.failed(error)
        raise
    except BaseException:
        report.left()
        raise
    report.finished()
    return Pooled(values, batch)


def _adapter(call: Call) -> AdapterStatus | None:
    """The adapter that the body's `model` names. Raises RequestFailed(MODEL_NOT_FOUND) if it has gone meanwhile."""
    named = call.form.model_in(call.json)
    name = call.server.check_model(named) if isinstance(named, str) else None
    return None if name is None else call.server.adapters[name]


def name_of_model(call: Call) -> str:
    """The name of the model, or of its adapter, that an answer comes from."""
    return call.server.adapter_of(call.form.model_in(call.json)) or call.server.model_name


def _check_size(facts: ModelFacts, tokens: int, ask: Ask) -> None:
    """Raises RequestFailed when the values of each token are too many for one answer."""
    if ask.task not in (PoolingTask.EMBED_TOKENS, PoolingTask.CLASSIFY_TOKENS):
        return
    width = len(facts.labels) if ask.task is PoolingTask.CLASSIFY_TOKENS else ask.dimensions or facts.vector_width
    numbers = tokens * max(1, width)
    if numbers > MOST_NUMBERS:
        raise invalid(
            f"the values of {tokens} tokens are {numbers} numbers; at most {MOST_NUMBERS} are possible in one answer: "
            "send fewer texts at a time"
        )


def other_task(server: ServerState, task: str) -> RequestFailed:
    """The error for a route that needs a model with this task, which the served one does not have."""
    return RequestFailed(
        ErrorKind.WRONG_TASK,
        f"this route needs a model that {IN_WORDS[task]}, and {server.model_name!r} {IN_WORDS[server.task]} (task "
        f"{server.task}): ask {ROUTES_OF_TASK[server.task]}, or start a server with --task {task}",
    )
