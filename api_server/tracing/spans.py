"""Spans of ended requests: one of the HTTP request, one of each answer, and their stages from the decision log.

    chat MODEL                         the HTTP request; child of the caller's span, if it has one
      prepare                          until the request is at the scheduler: template, tokens, images, grammar
      llm_request                      one answer, under vLLM's name
        queue, prefill, decode         its stages, and its decisions as events
        preempted, recovery            where it lost its blocks or its worker
      compute                          a batch of one forward pass, of texts to embed or classify

A trace begins and ends where the clocks of API process and scheduler, which share a machine, say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from api_server.trace_context import SAMPLED, TraceContext
from api_server.tracing import names
from api_server.tracing.ids import random_span_id
from api_server.tracing.records import Answer, Record, answer_attributes, request_attributes
from interfaces import Decision, Stage

_NAMES = {
    Stage.QUEUED: "queue",
    Stage.PLACED: "prefill",
    Stage.COMPUTED: "compute",
    Stage.FIRST_TOKEN: "decode",
    Stage.PREEMPTED: "preempted",
    Stage.RECOVERED: "recovery",
}

# What the texts of decisions begin with that have an error's message after it.
_WITH_MESSAGES = ("failed", "refused")


class SpanMaker:
    """Makes spans for one resource, with the newest names or those that most tools read."""

    def __init__(self, resource: Resource, scope: InstrumentationScope, latest_names: bool) -> None:
        self._resource = resource
        self._scope = scope
        self._latest = latest_names

    def spans(self, record: Record, decisions: Sequence[Decision]) -> Iterator[ReadableSpan]:
        """The spans of one request. `decisions` are the scheduler's about its id, in their order.

        Its client may have given the same id to other requests, also at the same time: their spans are others.
        """
        root = context_of(record.span)
        start = _unix(record, record.started)
        end = _unix(record, record.ended)
        operation = names.operation(record.path)
        attributes = {
            names.OPERATION: operation,
            names.provider(self._latest): names.PROVIDER,
            names.REQUEST_MODEL: record.model,
            names.RESPONSE_MODEL: record.model if record.served else None,
            **request_attributes(record),
        }
        about = ": ".join(filter(None, (record.error, record.field)))
        status = Status(StatusCode.ERROR, about) if about else Status(StatusCode.UNSET)
        name = f"{operation} {record.model}".rstrip()
        parent = None if record.caller is None else context_of(record.caller, remote=True)
        yield self._span(name, root, parent, start, end, attributes, kind=SpanKind.SERVER, status=status)
        if record.answers:
            submitted = min(_unix(record, answer.submitted) for answer in record.answers)
            yield self._span("prepare", _child(root), root, start, max(start, submitted), {})
        stories = _stories([one for one in decisions if one.span_id == record.span.span_id])
        for number, answer in enumerate(record.answers):
            # A request that was submitted anew has further stories: they belong to its last answer.
            last = number == len(record.answers) - 1
            yield from self._answer(record, answer, root, stories[number:] if last else stories[number : number + 1])
        for story in () if record.answers else stories:
            yield from self._stages(story, root, end)

    def _answer(
        self, record: Record, answer: Answer, root: SpanContext, stories: Sequence[list[Decision]]
    ) -> Iterator[ReadableSpan]:
        own = _child(root)
        start = _unix(record, answer.submitted)
        end = _unix(record, record.ended if answer.last_token is None else answer.last_token)
        yield self._span(names.LLM_REQUEST, own, root, start, end, answer_attributes(answer, record.started))
        for story in stories:
            yield from self._stages(story, own, end)

    def _stages(self, story: Sequence[Decision], parent: SpanContext, end: int) -> Iterator[ReadableSpan]:
        """A span for each stage of one answer, with the decisions that fell into it as events."""
        begun: list[Decision] = []
        worker = -1
        has_token = False
        for decision in story:
            if begun and decision.stage == Stage.NOTE:
                begun.append(decision)
                continue
            if begun and begun[0].stage in _NAMES:
                ending = [*begun, decision] if decision.stage == Stage.ENDED else begun
                yield self._stage(ending, parent, _nanoseconds(decision), worker, has_token)
            has_token |= decision.stage == Stage.FIRST_TOKEN
            worker = worker if decision.stage == Stage.FIRST_TOKEN else decision.worker
            begun = [decision]
        if begun and begun[0].stage in _NAMES:
            yield self._stage(begun, parent, end, worker, has_token)

    def _stage(
        self, begun: Sequence[Decision], parent: SpanContext, until: int, worker: int, has_token: bool
    ) -> ReadableSpan:
        first = begun[0]
        # Where tokens were sent before, a place is for going on with them.
        name = "decode" if first.stage == Stage.PLACED and has_token else _NAMES[first.stage]
        start = _nanoseconds(first)
        events = [Event("decision", {names.DECISION: _shown(each.text)}, _nanoseconds(each)) for each in begun]
        attributes = {names.WORKER: worker if worker >= 0 else None}
        return self._span(name, _child(parent), parent, start, until, attributes, events)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: int,
        end: int,
        attributes: Mapping[str, Any],
        events: Sequence[Event] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            {key: value for key, value in attributes.items() if value is not None},
            events,
            kind=kind,
            status=status or Status(StatusCode.UNSET),
            start_time=start,
            end_time=max(start, end),
            instrumentation_scope=self._scope,
        )


def context_of(span: TraceContext, remote: bool = False) -> SpanContext:
    """The SDK's form of a span's place."""
    state = TraceState.from_header([span.state]) if span.state else TraceState()
    return SpanContext(int(span.trace_id, 16), int(span.span_id, 16), remote, TraceFlags(span.flags), state)


def _child(parent: SpanContext) -> SpanContext:
    return SpanContext(parent.trace_id, random_span_id(), False, TraceFlags(SAMPLED), parent.trace_state)


def _stories(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """The decisions about each answer, in the order in which the answers were submitted."""
    ordered = sorted((one for one in decisions if one.sequence >= 0), key=lambda one: (one.sequence, one.seconds))
    return [list(group) for _, group in groupby(ordered, key=lambda one: one.sequence)]


def _shown(text: str) -> str:
    """A decision's text without the message of an error, because messages may quote a client's values."""
    kind = text.partition(":")[0]
    return kind if kind in _WITH_MESSAGES else text


def _unix(record: Record, seconds: float) -> int:
    return record.offset_ns + int(seconds * 1e9)


def _nanoseconds(decision: Decision) -> int:
    return int(decision.seconds * 1e9)
