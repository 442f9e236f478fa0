"""A scheduler on the real wire that computes nothing: what it "generates" is what a test says."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zmq

from interfaces.context.pooling import PoolingContext
from interfaces.messages import (
    Action,
    AdapterAnswer,
    AdapterOrder,
    AdapterState,
    AdapterStatus,
    Cancel,
    DecisionsAnswer,
    DecisionsInquiry,
    Detach,
    Finish,
    Goodbye,
    Hello,
    Order,
    OrderAnswer,
    Results,
    SessionOrder,
    Status,
    Submit,
    Vectors,
    WeightsAnswer,
    WeightsOrder,
    WorkerStatus,
)
from interfaces.messages.hidden_states import HiddenStates
from interfaces.messages.logprob_reports import LogprobReports
from interfaces.request.lora import LoRAOperation, LoRAStatus
from interfaces.request.sampling import SamplingParams
from interfaces.result.pooled_values import PooledValues
from interfaces.result.results import ErrorCode, RequestError
from interfaces.wire.codec import decode
from scheduler.request_log import RequestLog
from scheduler.sessions import Sessions
from shared.sockets import bind_router, send_to


@dataclass
class Running:
    """A request as the double plays it."""

    replica: bytes
    submit: Submit
    tokens: list[int]
    done: int


def sums_of(context: PoolingContext) -> PooledValues:
    """The sum and the number of each text's tokens."""
    rows = [[text.sum(), len(text)] for text in context.texts()]
    return PooledValues(np.array(rows, np.float32), np.ones(len(context), np.int32))


@dataclass
class SchedulerDouble:
    """Speaks `interfaces.messages` on a ROUTER; what it "generates" is `answer(submit)`, one token a step."""

    endpoint: str
    answer: Callable[[Submit], list[int]]
    max_model_len: int = 256
    vocab_size: int = 1000
    ready: bool = True
    step_seconds: float = 0.001
    hold: threading.Event = field(default_factory=threading.Event)
    """While set, no tokens are generated."""
    silent: threading.Event = field(default_factory=threading.Event)
    """While set, no Status is sent."""
    refuse: RequestError | None = None
    full_from: int | None = None
    """The number of submits from which on the queue is full for all that were not in it before."""
    cached: int = 0
    guesses: list[int] = field(default_factory=list)
    queued_us: int = 1500
    steps: int = 1
    refuse_order: str = ""
    ignore_orders: bool = False
    refuse_weights: str = ""
    weights_orders: list[WeightsOrder] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    request_log: RequestLog = field(default_factory=RequestLog)
    """Decisions that the double answers with; it makes none itself."""
    sessions: Sessions = field(default_factory=Sessions)
    hidden_size: int = 4
    tasks: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    pooled: Callable[[PoolingContext], PooledValues] = sums_of
    """The values of a one-shot request; they are sent in two halves."""
    images: int = 0
    # Schemas of the parameters of logits processors, as JSON text, by name.
    processors: dict[str, str] = field(default_factory=dict)
    adapters: list[AdapterStatus] = field(default_factory=list)
    adapter_orders: list[AdapterOrder] = field(default_factory=list)
    fail_adapter: tuple[LoRAStatus, str] | None = None
    """The answer to every order about adapters."""
    ignore_adapter_orders: bool = False
    adapter_users: int = 0
    """Open requests of an adapter that is unloaded; it is gone when they are 0."""
    incarnation: int = field(default_factory=lambda: secrets.randbits(31))
    submits: list[Submit] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    detached: list[int] = field(default_factory=list)
    goodbyes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._restart = threading.Event()
        self._raw: list[bytes] = []
        self.running: dict[tuple[bytes, int], Running] = {}
        self.pooling: dict[tuple[bytes, int], PoolingContext] = {}
        self._replicas: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """As after a crash: everything is forgotten, the socket is bound anew."""
        self._restart.set()
        while self._restart.is_set():
            time.sleep(0.001)

    def send_raw(self, data: bytes) -> None:
        self._raw.append(data)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def wait(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        """Until `condition()` holds; fails otherwise."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the scheduler double has waited in vain"
            time.sleep(0.002)

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        router = bind_router(context, self.endpoint)
        next_status = 0.0
        while not self._stop.is_set():
            if self._restart.is_set():
                router.close(0)
                self.running, self.pooling, self._replicas = {}, {}, set()
                self.incarnation += 1
                router = bind_router(context, self.endpoint)
                self._restart.clear()
            while router.poll(max(1, int(self.step_seconds * 1000))):
                replica, data = router.recv_multipart()
                self._take(router, replica, decode(data, ipc_peer=True))
            while self._raw:
                data = self._raw.pop()
                for replica in self._replicas:
                    router.send_multipart([replica, data])
            if time.monotonic() >= next_status and not self.silent.is_set():
                next_status = time.monotonic() + 0.1
                for replica in self._replicas:
                    send_to(router, replica, self._status())
            if not self.hold.is_set():
                self._step(router)
        router.close(0)
        context.term()

    def _status(self) -> Status:
        worker = WorkerStatus("cpu", 0, 1, len(self.running), 100, 0, 0, self.steps, 0.0, max_rows=16, step_tokens=512)
        return Status(
            incarnation=self.incarnation,
            ready=self.ready,
            reason="" if self.ready else "loading weights",
            workers=[worker],
            waiting=0,
            running=len(self.running),
            max_model_len=self.max_model_len,
            max_running=16,
            block_size=16,
            vocab_size=self.vocab_size,
            counters={},
            hidden_size=self.hidden_size,
            tasks=self.tasks,
            vector_width=2,
            labels=self.labels,
            images=self.images,
            adapters=self.adapters,
            takes_adapters=True,
            processors=self.processors,
        )

    def _take(self, router: zmq.Socket[bytes], replica: bytes, message: Any) -> None:
        if isinstance(message, Hello):
            if replica not in self._replicas and not self.silent.is_set():
                send_to(router, replica, self._status())
            self._replicas.add(replica)
        elif isinstance(message, Goodbye):
            self.goodbyes.append(message.replica)
        elif isinstance(message, Cancel):
            self.cancelled += message.handles.tolist()
            for handle in message.handles.tolist():
                self.running.pop((replica, handle), None)
                self.pooling.pop((replica, handle), None)
        elif isinstance(message, Detach):
            self.detached += message.handles.tolist()
            for handle in message.handles.tolist():
                self.running.pop((replica, handle), None)
        elif isinstance(message, Order):
            self._obey(router, replica, message)
        elif isinstance(message, WeightsOrder):
            self.weights_orders.append(message)
            send_to(router, replica, WeightsAnswer(self.incarnation, message.number, self.refuse_weights, "default"))
        elif isinstance(message, AdapterOrder):
            self._obey_adapter(router, replica, message)
        elif isinstance(message, DecisionsInquiry):
            decisions = self.request_log.decisions(message.request_ids)
            send_to(router, replica, DecisionsAnswer(self.incarnation, message.number, decisions))
        elif isinstance(message, SessionOrder):
            send_to(router, replica, self.sessions.obey(message, self.incarnation))
        elif isinstance(message, Submit):
            self.submits.append(message)
            if self.refuse is not None:
                send_to(router, replica, self._refusal(message, self.refuse))
                return
            if self.full_from is not None and len(self.submits) > self.full_from and not message.again:
                full = RequestError(ErrorCode.OVERLOADED, "the queue is full")
                send_to(router, replica, self._refusal(message, full))
                return
            key = (replica, message.handle)
            if isinstance(message.context, PoolingContext):
                self.pooling[key] = message.context
                return
            self.running[key] = Running(replica, message, self.answer(message), message.text.tokens.generated_length)

    def _obey(self, router: zmq.Socket[bytes], replica: bytes, order: Order) -> None:
        """Aborts as the scheduler does; a request counts as placed when it has a token."""
        self.orders.append(order)
        if self.ignore_orders:
            return
        prefixes = tuple(order.request_ids if order.action == Action.ABORT else ())
        chosen = [k for k, r in self.running.items() if r.submit.context.request_id.startswith(prefixes)]
        for key in chosen:
            send_to(router, key[0], self._update([key[1]], [-1], [Finish.CANCELLED]))
            del self.running[key]
        send_to(router, replica, OrderAnswer(self.incarnation, order.number, self.refuse_order, len(chosen)))

    def add_adapter(self, name: str, path: str, pinned: bool = False) -> None:
        handle = len(self.adapter_orders) + len(self.adapters) + 1
        status = AdapterStatus(handle, name, path, f"digest of {path}", 8, 100, pinned, AdapterState.READY, 0, 1)
        self.adapters = [*(one for one in self.adapters if one.name != name), status]

    def _obey_adapter(self, router: zmq.Socket[bytes], replica: bytes, order: AdapterOrder) -> None:
        self.adapter_orders.append(order)
        if self.ignore_adapter_orders:
            return
        name = order.request.lora_name
        known = any(one.name == name and one.state == AdapterState.READY for one in self.adapters)
        status = LoRAStatus.SUCCESS
        text = ""
        if self.fail_adapter is not None:
            status, text = self.fail_adapter
        elif order.request.operation is LoRAOperation.LOAD and known and not order.replace:
            status = LoRAStatus.LOAD_NAME_EXISTS
        elif order.request.operation is LoRAOperation.LOAD:
            self.add_adapter(name, order.request.lora_path or "", order.pinned)
        elif not known:
            status = LoRAStatus.UNLOAD_NAME_NONEXISTENT
        else:
            self._unload(name)
        answer = AdapterAnswer(self.incarnation, order.number, status, text, self.adapter_users, self.adapters)
        send_to(router, replica, answer)

    def _unload(self, name: str) -> None:
        leaving = next(one for one in self.adapters if one.name == name)
        others = [one for one in self.adapters if one is not leaving]
        if self.adapter_users:
            others.append(replace(leaving, state=AdapterState.LEAVING, requests=self.adapter_users))
        self.adapters = others

    def _update(self, handles: list[int], tokens: list[int], finished: list[int]) -> Results:
        return Results(
            self.incarnation, np.array(handles, np.int32), np.array(tokens, np.int32), np.array(finished, np.int8)
        )

    def _refusal(self, submit: Submit, error: RequestError) -> Results:
        return Results(
            self.incarnation,
            np.array([submit.handle], np.int32),
            np.array([-1], np.int32),
            np.array([Finish.FAILED], np.int8),
            errors={submit.handle: error},
        )

    def _pool(self, router: zmq.Socket[bytes]) -> None:
        for (replica, handle), context in self.pooling.items():
            values = self.pooled(context)
            middle = len(context) // 2
            for first, end in ((middle, len(context)), (0, middle)):
                if first < end:
                    part = values.part(first, end)
                    send_to(router, replica, Vectors(self.incarnation, handle, first, part, self.queued_us))
        self.pooling.clear()

    def _step(self, router: zmq.Socket[bytes]) -> None:
        self._pool(router)
        for replica, group in itertools.groupby(
            sorted(self.running.items(), key=lambda item: item[0]), key=lambda item: item[0][0]
        ):
            columns = [(handle, *self._next(running)) for (_, handle), running in group]
            handles, tokens, finished = (list(column) for column in zip(*columns, strict=True))
            results = Results(
                self.incarnation,
                np.array(handles, np.int32),
                np.array(tokens, np.int32),
                np.array(finished, np.int8),
                self._logprobs(tokens, [key for key in self.running if key[0] == replica]),
                cached=dict.fromkeys(handles, self.cached),
                queued=dict.fromkeys(handles, self.queued_us),
                guesses=dict.fromkeys(handles, self.guesses) if self.guesses else {},
                reports=self._reports(tokens, [key for key in self.running if key[0] == replica]),
                hidden=self._hidden([key for key in self.running if key[0] == replica]),
            )
            send_to(router, replica, results)
            for handle, code in zip(handles, finished, strict=True):
                if code != Finish.ACTIVE:
                    del self.running[replica, handle]

    def _logprobs(self, tokens: list[int], keys: list[tuple[bytes, int]]) -> np.ndarray[Any, Any] | None:
        wanted = any(self.running[key].submit.text.sampling_params.logprobs for key in keys)
        return np.array([logprob_of(token) for token in tokens], np.float32) if wanted else None

    def _reports(self, tokens: list[int], keys: list[tuple[bytes, int]]) -> LogprobReports | None:
        """Of the prompt with its first token, and of the token; `report_of` says what."""
        entries: list[tuple[int, int, int, SamplingParams]] = []
        for token, key in zip(tokens, keys, strict=True):
            context, done = self.running[key].submit.text, self.running[key].done
            prompt = context.tokens.prompt.tolist()
            if done == context.tokens.generated_length + 1:
                entries += [
                    (key[1], i, prompt[i], context.sampling_params)
                    for i in range(context.next_prompt_report, len(prompt))
                ]
            if context.sampling_params.top_logprobs or context.sampling_params.logprob_ids:
                entries.append((key[1], len(prompt) + done - 1, token, context.sampling_params))
        if not entries:
            return None
        told = [report_of(token, params) for _, _, token, params in entries]
        return LogprobReports(
            owners=np.array([handle for handle, *_ in entries], np.int32),
            positions=np.array([position for _, position, *_ in entries], np.int32),
            chosen=np.array([logprob_of(token) for _, _, token, _ in entries], np.float32),
            tops=np.array([len(top) for top, _ in told], np.int32),
            counts=np.array([len(top) + len(asked) for top, asked in told], np.int32),
            ids=np.array([i for top, asked in told for i in (*top, *asked)], np.int32),
            values=np.array([logprob_of(i) for top, asked in told for i in (*top, *asked)], np.float32),
        )

    def _hidden(self, keys: list[tuple[bytes, int]]) -> HiddenStates | None:
        """With the first token those of the prompt, then each token's before; every number says whose it is."""
        entries: list[tuple[int, int]] = []
        for key in keys:
            context, done = self.running[key].submit.text, self.running[key].done
            if context.hidden_states:
                last = context.prompt_length + done - 2
                entries += [(key[1], i) for i in range(0 if done == 1 else last, last + 1)]
        if not entries:
            return None
        owners, positions = np.array(entries, np.int32).T
        values = np.repeat(positions.astype(np.float32), self.hidden_size)
        return HiddenStates(owners.copy(), positions.copy(), values)

    def _next(self, running: Running) -> tuple[int, int]:
        sampling = running.submit.text.sampling_params
        token = running.tokens[running.done % len(running.tokens)]
        running.done += 1
        if token in (sampling.stop_token_ids or ()) and running.done > sampling.min_new_tokens:
            return token, Finish.STOP
        return token, Finish.LENGTH if running.done == sampling.max_new_tokens else Finish.ACTIVE


def logprob_of(token: int) -> float:
    """What the double reports for a token; exact in float32."""
    return -(token % 64) / 8


def report_of(token: int, params: SamplingParams) -> tuple[list[int], list[int]]:
    """The "most probable" ids that the double reports with a token, most probable first, and the named ones."""
    top = sorted(((token + 3 * i) % 600 for i in range(params.top_logprobs)), key=logprob_of, reverse=True)
    return top, params.logprob_ids
