"""Spans from records and decisions: the right stages, on the right worker, whatever has happened to a request."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from api_server.trace_context import TraceContext
from api_server.tracing.records import Answer, Record, Texts
from api_server.tracing.spans import SpanMaker
from interfaces import Decision, Stage

SPAN = TraceContext("1" * 32, "2" * 16, 1)
MAKER = SpanMaker(Resource({}), InstrumentationScope("test"), latest_names=False)


def record_of(*answers: Answer, texts: int = 0, error: str = "", field: str = "", called: bool = False) -> Record:
    return Record(
        span=SPAN,
        caller=SPAN if called else None,
        request_id="r",
        method="POST",
        path="/v1/completions",
        server=("127.0.0.1", 8000),
        status=200,
        outcome="ok",
        error=error,
        field=field,
        started=1.0,
        ended=9.0,
        offset_ns=0,
        answers=list(answers),
        shots=[Texts("m", texts, 10, None)] if texts else [],
    )


def answer(submitted: float, last: float | None) -> Answer:
    return Answer("m", "r", 0, 1, None, 3, 0, 5, 0, None, submitted, 0.5, submitted + 1, last)


def told(sequence: int, *stages: tuple[float, int, int], span_id: str = SPAN.span_id) -> list[Decision]:
    return [Decision(0, sequence, at, stage, worker, f"{stage}", span_id) for at, stage, worker in stages]


def shown(record: Record, decisions: list[Decision], parent: str) -> list[tuple[str, float, float, Any]]:
    """Name, beginning, end and worker of the spans below those with this name."""
    spans = list(MAKER.spans(record, decisions))
    above = {span.context.span_id for span in spans if span.name == parent}
    return [
        (span.name, span.start_time / 1e9, span.end_time / 1e9, span.attributes.get("tokenyard.worker"))
        for span in spans
        if span.parent is not None and span.parent.span_id in above
    ]


def test_a_request_that_nothing_happens_to() -> None:
    decisions = told(7, (2, Stage.QUEUED, -1), (3, Stage.PLACED, 1), (4, Stage.FIRST_TOKEN, -1), (8, Stage.ENDED, -1))
    assert shown(record_of(answer(2, 8)), decisions, "llm_request") == [
        *(("queue", 2, 3, None), ("prefill", 3, 4, 1), ("decode", 4, 8, 1))
    ]
    assert shown(record_of(answer(2, 8)), decisions, "text_completion m") == [
        *(("prepare", 1, 2, None), ("llm_request", 2, 8, None))
    ]


def test_a_preempted_one_and_a_crash() -> None:
    decisions = told(
        7,
        *((2, Stage.QUEUED, -1), (3, Stage.PLACED, 0), (3.5, Stage.PREEMPTED, -1), (4, Stage.PLACED, 0)),
        *((5, Stage.FIRST_TOKEN, -1), (6, Stage.RECOVERED, -1), (7, Stage.PLACED, 1)),
    )
    assert shown(record_of(answer(2, 8)), decisions, "llm_request") == [
        *(("queue", 2, 3, None), ("prefill", 3, 3.5, 0), ("preempted", 3.5, 4, None), ("prefill", 4, 5, 0)),
        *(("decode", 5, 6, 0), ("recovery", 6, 7, None), ("decode", 7, 8, 1)),
    ]


def test_two_answers_of_one_request_keep_their_own_stages() -> None:
    first = told(7, (2, Stage.QUEUED, -1), (3, Stage.PLACED, 0), (4, Stage.FIRST_TOKEN, -1), (5, Stage.ENDED, -1))
    second = told(8, (2, Stage.QUEUED, -1), (5, Stage.PLACED, 1), (6, Stage.FIRST_TOKEN, -1), (8, Stage.ENDED, -1))
    mixed = sorted([*second, *first], key=lambda decision: decision.seconds)
    spans = list(MAKER.spans(record_of(answer(2, 5), answer(2, 8)), mixed))
    requests = [span for span in spans if span.name == "llm_request"]
    for request, end, worker in zip(requests, (5, 8), (0, 1), strict=True):
        assert request.end_time == end * 1e9
        below = [span for span in spans if span.parent is not None and span.parent.span_id == request.context.span_id]
        assert [span.name for span in below] == ["queue", "prefill", "decode"]
        assert below[-1].attributes["tokenyard.worker"] == worker


def test_requests_with_one_id_keep_their_own_stages() -> None:
    """Also those that run at the same time."""
    first = ((1.9, Stage.QUEUED, -1), (2.1, Stage.PLACED, 3), (3.1, Stage.FIRST_TOKEN, -1), (4, Stage.ENDED, -1))
    before = told(5, *first, span_id="3" * 16)
    own = told(7, (2, Stage.QUEUED, -1), (3, Stage.PLACED, 1), (4, Stage.FIRST_TOKEN, -1), (8, Stage.ENDED, -1))
    after = told(9, (2.5, Stage.QUEUED, -1), (7, Stage.PLACED, 2), (12, Stage.ENDED, -1), span_id="")
    mixed = sorted([*before, *own, *after], key=lambda decision: decision.seconds)
    assert shown(record_of(answer(2, 8)), mixed, "llm_request") == [
        *(("queue", 2, 3, None), ("prefill", 3, 4, 1), ("decode", 4, 8, 1))
    ]


def test_decisions_are_events_of_the_stage_that_they_fell_into() -> None:
    decisions = told(7, (2, Stage.QUEUED, -1), (3, Stage.PLACED, 0), (3.5, Stage.NOTE, -1), (4, Stage.ENDED, -1))
    spans = {span.name: span for span in MAKER.spans(record_of(answer(2, None)), decisions)}
    texts = [event.attributes["tokenyard.decision"] for event in spans["prefill"].events]
    assert texts == [str(Stage.PLACED), str(Stage.NOTE), str(Stage.ENDED)]
    assert spans["llm_request"].end_time == 9e9


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("failed: the parameters {'secret': 1} are refused", "failed"),
        ("refused: 'secret' is unknown", "refused"),
        ("finished: 2 texts in 1 parts", "finished: 2 texts in 1 parts"),
    ],
)
def test_messages_of_errors_stay_here(text: str, shown: str) -> None:
    own = SPAN.span_id
    decisions = [Decision(0, 7, 2, Stage.QUEUED, -1, "queued", own), Decision(0, 7, 3, Stage.ENDED, -1, text, own)]
    (queue,) = [span for span in MAKER.spans(record_of(answer(2, None)), decisions) if span.name == "queue"]
    assert [event.attributes["tokenyard.decision"] for event in queue.events] == ["queued", shown]


def test_texts_are_computed_below_the_request_itself() -> None:
    decisions = told(3, (2, Stage.QUEUED, -1), (3, Stage.COMPUTED, 0), (4, Stage.ENDED, -1))
    assert shown(record_of(texts=2), decisions, "text_completion m") == [("queue", 2, 3, None), ("compute", 3, 4, 0)]


def test_a_failure_says_why_and_has_no_model_that_answered() -> None:
    (span,) = MAKER.spans(record_of(error="invalid", field="max_tokens", called=True), [])
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "invalid: max_tokens")
    assert "gen_ai.response.model" not in span.attributes
    assert span.parent is not None
    assert span.parent.is_remote


@pytest.mark.parametrize(("latest", "name"), [(False, "gen_ai.system"), (True, "gen_ai.provider.name")])
def test_the_newest_names_are_chosen_by_the_operator(latest: bool, name: str) -> None:
    (span,) = SpanMaker(Resource({}), InstrumentationScope("test"), latest).spans(record_of(), [])
    assert span.attributes[name] == "tokenyard"
    assert len({"gen_ai.system", "gen_ai.provider.name"} & span.attributes.keys()) == 1
