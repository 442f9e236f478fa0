"""What the API's processes say to the scheduler, and its answers to them.

Knows messages. Does not know sockets: it answers through `send`, which returns False for a peer that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from interfaces import (
    Action,
    AdapterOrder,
    Cancel,
    DecisionsAnswer,
    DecisionsInquiry,
    Detach,
    Goodbye,
    Hello,
    Inquiry,
    InquiryAnswer,
    Order,
    OrderAnswer,
    SessionOrder,
    Submit,
    Unknown,
    WeightsOrder,
    WireError,
)
from scheduler.core import Scheduler
from scheduler.health import Health

log = logging.getLogger(__name__)


class ApiMessages:
    """Carries out what a replica asks for. `send_results` sends the results that are there, before an answer."""

    def __init__(
        self,
        scheduler: Scheduler,
        health: Health,
        send: Callable[[bytes, Any], bool],
        send_results: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._health = health
        self._send = send
        self._send_results = send_results

    def handle(self, identity: bytes, message: object) -> None:
        """Carry out a message. WireError for one that a replica may not send."""
        scheduler = self._scheduler
        self._health.replica_heard(identity)
        match message:
            case Submit():
                scheduler.submit(identity, message)
            case Cancel():
                scheduler.cancel(identity, message.handles.tolist())
            case Detach():
                scheduler.detach(identity, message.handles.tolist())
            case Order():
                self._run_command(identity, message)
            case SessionOrder():
                self._send(identity, scheduler.sessions.obey(message, scheduler.incarnation))
            case AdapterOrder():
                scheduler.adapters.obey(identity, message)
                self._health.check_soon()
            case WeightsOrder():
                scheduler.weights.obey(identity, message)
                self._health.check_soon()
            case Hello():
                self._register(identity, message)
            case Goodbye():
                self._health.drop_replica(identity, "said goodbye")
            case Inquiry():
                self._answer_inquiry(identity, message.request_id)
            case DecisionsInquiry():
                decisions = scheduler.request_log.decisions(message.request_ids)
                self._send(identity, DecisionsAnswer(scheduler.incarnation, message.number, decisions))
            case _:
                raise WireError(f"an API replica may not send {type(message).__name__}")

    def _register(self, identity: bytes, hello: Hello) -> None:
        """Register a replica, and send it the requests that it holds open but that are not known here.

        It submits those again.
        """
        new = self._scheduler.replicas.greet(identity)
        if new:
            log.info("API replica %s is here", hello.replica)
            self._health.check_soon()
        unknown = self._scheduler.reconcile(identity, hello.handles.tolist())
        if unknown:
            # After the results: they may have the end of one of these requests.
            self._send_results()
            self._send(identity, Unknown(self._scheduler.incarnation, np.array(unknown, np.int32), new))

    def _run_command(self, identity: bytes, order: Order) -> None:
        """Carry out an operator's command and answer, after the results that it makes."""
        scheduler = self._scheduler
        refused = ""
        requests = 0
        match order.action:
            case Action.FLUSH_CACHE:
                refused = scheduler.flush_cache()
            case Action.ABORT:
                requests = scheduler.abort(order.request_ids)
            case Action.PAUSE | Action.CONTINUE:
                scheduler.paused = order.action == Action.PAUSE
                self._health.check_soon()
            case Action.RETRACT:
                requests = scheduler.retract()
            case Action.DRAIN:
                scheduler.requests.drain.begin()
                requests = self._ending()
                self._health.check_soon()
            case Action.DRAIN_ON:
                refused = scheduler.requests.drain.go_on()
                requests = self._ending()
            case _:
                refused = f"there is no action {order.action}"
        self._send_results()
        self._send(identity, OrderAnswer(scheduler.incarnation, order.number, refused, requests))

    def _ending(self) -> int:
        """The number of requests whose end is near: none while nothing is computed."""
        still = self._scheduler.paused or self._scheduler.weights.absent
        return 0 if still else self._scheduler.requests.started

    def _answer_inquiry(self, identity: bytes, request_id: str) -> None:
        request_log = self._scheduler.request_log
        lines = request_log.of(request_id) if request_id else request_log.events
        self._send(identity, InquiryAnswer(self._scheduler.incarnation, lines, self._scheduler.status()))
