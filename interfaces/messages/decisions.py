"""Decisions about requests for programs: what `Inquiry` answers for people, with a code for each stage of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from interfaces.wire.codec import message


class Stage:
    """Codes of `Decision.stage`: what a request is in from this decision on.

    NOTE changes no stage. QUEUED waits for a worker. PLACED has a row of `Decision.worker`, COMPUTED is in a batch of
    one forward pass there. FIRST_TOKEN has its first token. PREEMPTED and RECOVERED wait again, because blocks were
    wanted, or because a worker was lost. ENDED is over.
    """

    NOTE = 0
    QUEUED = 1
    PLACED = 2
    COMPUTED = 3
    FIRST_TOKEN = 4
    PREEMPTED = 5
    RECOVERED = 6
    ENDED = 7


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. `request` is an index into `DecisionsInquiry.request_ids`.

    `sequence` tells apart the answers of one request, in the order in which they were submitted; -1: it is about none.
    `seconds` is Unix time. `worker` is -1 where no worker is meant. `text` is for people. `span_id` is that of
    `SchedulingOptions`: clients may give several requests one id.
    """

    request: int
    sequence: int
    seconds: float
    stage: int
    worker: int
    text: str
    span_id: str


@message(39)
@dataclass(frozen=True, slots=True)
class DecisionsInquiry:
    """Asks for the decisions about requests with these ids. `number` is the replica's name for the inquiry."""

    number: int
    request_ids: list[str]


@message(40)
@dataclass(frozen=True, slots=True)
class DecisionsAnswer:
    """Answers it: decisions of each request, oldest first. A request that is not known any more has none."""

    incarnation: int
    number: int
    decisions: list[Decision] = field(default_factory=list)
