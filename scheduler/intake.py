"""How requests come from the API's processes: admitted, refused, cancelled, and taken up again by another client.

Knows who asks for what. Does not know where requests run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from interfaces import ErrorCode, Finish, PoolingContext, RequestError, Submit
from scheduler import placement
from scheduler.adapter_registry import AdapterRegistry
from scheduler.limits import Limits
from scheduler.oneshot import OneShotLane
from scheduler.oneshot_adapters import gone
from scheduler.open_requests import OpenRequests
from scheduler.replicas import NO_REPLICA
from scheduler.resumable_streams import Stream
from scheduler.sequence import Sequence


class Intake:
    """Requests that generate go into the queue, others to the lane of those that are computed at once."""

    def __init__(
        self,
        requests: OpenRequests,
        limits: Limits,
        oneshot: OneShotLane,
        adapters: AdapterRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._oneshot = oneshot
        self._adapters = adapters
        self._clock = clock
        self._order = itertools.count()

    def submit(self, identity: bytes, submit: Submit) -> None:
        """Take a request in, or refuse it with a reason."""
        requests = self._requests
        replica = requests.replicas.register(identity)
        self.cancel(identity, [submit.handle])
        if isinstance(submit.context, PoolingContext):
            self._oneshot.submit(identity, submit, submit.context, next(self._order))
            return
        stream = requests.streams.find(submit)
        if stream is not None and stream.has_all(submit.text):
            self._reattach(stream, identity, submit)
            return
        if stream is not None and stream.finished == Finish.ACTIVE:
            # The new request samples the same tokens again, with everything that was published about them.
            before = stream.sequence
            requests.outbox.end(requests.replicas.number_of(before), before.handle, Finish.CANCELLED)
            requests.forget(before)
        error = self._refusal(submit)
        if error is not None:
            requests.counters["failed"] += 1
            requests.request_log.record(submit.context.request_id, f"refused: {error.message}")
            requests.outbox.fail(replica.number, submit.handle, error)
            return
        sequence = Sequence.of(identity, submit, next(self._order), self._clock)
        sequence.checked = bool(requests.workers)
        sequence.adapter = self._adapters.find(submit.text) if submit.text.adapter else None
        requests.add(sequence)

    def detach(self, identity: bytes, handles: list[int]) -> None:
        """Detach requests whose client left. Resumable ones keep running; the others are cancelled."""
        requests = self._requests
        for handle in handles:
            sequence = requests.replicas.sequence(identity, handle)
            stream = requests.streams.of(sequence)
            if sequence is None or stream is None:
                self.cancel(identity, [handle])
                continue
            requests.record(sequence, f"its client is gone; it goes on, from {sequence.emitted} tokens")
            requests.streams.orphan(stream)
            requests.change_listener(sequence, NO_REPLICA, handle)

    def cancel(self, identity: bytes, handles: list[int]) -> None:
        """Cancel requests of a replica. Unknown handles are ignored."""
        for handle in handles:
            sequence = self._requests.replicas.sequence(identity, handle)
            if sequence is not None:
                text = f"cancelled by its API process, which had {sequence.emitted} tokens"
                self._requests.cancel(sequence, text)
            else:
                self._oneshot.cancel(identity, handle)

    def reconcile(self, identity: bytes, handles: list[int]) -> list[int]:
        """Detach all requests of a replica but `handles`, which it holds open. Returns the handles not known here."""
        known = {*self._requests.replicas.register(identity).sequences, *self._oneshot.handles(identity)}
        named = set(handles)
        self.detach(identity, [handle for handle in known if handle not in named])
        return [handle for handle in handles if handle not in known]

    def drop_replica(self, identity: bytes) -> int:
        """Forget a replica and detach its requests. Returns their number."""
        replica = self._requests.replicas.get(identity)
        if replica is None:
            return 0
        handles = [*replica.sequences, *self._oneshot.handles(identity)]
        self.detach(identity, handles)
        self._requests.replicas.drop(identity)
        return len(handles)

    # Inside

    def _refusal(self, submit: Submit) -> RequestError | None:
        open_of_tenant = self._requests.open_of(submit.scheduling.tenant)
        waiting = self._requests.waiting
        number, tokens = len(waiting), waiting.tokens
        if not submit.scheduling.in_background:
            # Those of batches may wait for as long as others run: they fill no queue for these.
            number, tokens = number - waiting.background, tokens - waiting.background_tokens
        full = self._limits.refusal(number, tokens, len(submit.text.tokens), open_of_tenant)
        if full is not None and not submit.again:
            return RequestError(ErrorCode.OVERLOADED, full)
        context = submit.text
        if context.adapter and self._adapters.find(context) is None:
            return gone(context)
        # Requests also wait while a worker restarts. Whether they fit is checked when it is there.
        workers = self._requests.workers.values()
        if not workers:
            return None
        return placement.misfit(submit.text, workers, self._limits.max_model_len)

    def _reattach(self, stream: Stream, identity: bytes, submit: Submit) -> None:
        """Connect a stream to its client again, and replay everything that the client does not have."""
        requests = self._requests
        replica = requests.replicas.register(identity)
        sequence = stream.sequence
        if not stream.continues(submit):
            text = f"the stream {submit.scheduling.resume!r} answers another prompt or has other sampling values"
            requests.outbox.fail(replica.number, submit.handle, RequestError(ErrorCode.INVALID, text))
            return
        requests.record(sequence, f"taken up again by {identity.decode(errors='replace')}")
        before = requests.replicas.number_of(sequence), sequence.handle
        if requests.change_listener(sequence, identity, submit.handle):
            requests.outbox.end(*before, Finish.CANCELLED)
        stream.orphaned_at = None
        if stream.finished == Finish.ACTIVE:
            replica.sequences[submit.handle] = sequence
        stream.replay(requests.outbox, replica.number, submit.handle, submit.text)
