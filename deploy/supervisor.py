"""Keeps a list of child processes running: starts them, restarts the dead, gives up when that is hopeless, stops them
in order.

One thread, one selector: a child's end, its events and its output are descriptors (child.py), signals arrive through a
wakeup descriptor, and the only timers are restart delays, stop deadlines and the looks of hang_watch.py. A child that
works in a fork (shared/forkserver.py) reports its death by an event, and its fork server starts the next one. The death
of one member of a group (child.py) ends the whole group. SIGHUP is handled in rolling.py. Does not know what the
children do; their last role in the list is stopped first.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from deploy.child import Child, ChildSpec, describe_exit
from deploy.hang_watch import HangWatch
from deploy.rolling import RollingRestart
from deploy.slot import RestartPolicy, Slot

_SECONDS_AFTER_KILL = 5.0
_ONE_KEYSTROKE = 0.3
# Exit statuses, as `tokenyard serve --help` has them: another start may fare better after the first.
_GAVE_UP = 1
_WRONG_SETTING = 2


class Observer(Protocol):
    """Gets the events of a supervisor; `level` is INFO, WARNING or ERROR."""

    def started(self, child: ChildSpec) -> None: ...
    def event(self, child: ChildSpec, event: dict[str, Any]) -> None: ...
    def output(self, line: str) -> None: ...
    def say(self, level: str, text: str) -> None: ...
    def exited(self, child: ChildSpec, pid: int) -> None: ...
    def silent(self, child: ChildSpec, seconds: float) -> None: ...
    def hung(self, child: ChildSpec) -> None: ...
    def all_ready(self) -> None: ...

    def stopping(self) -> None:
        """Called just before the children are stopped."""


class Supervisor:
    """Runs the children of `specs` until a signal ends it or a child cannot be kept alive."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        observer: Observer,
        policy: RestartPolicy | None = None,
        on_hangup: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the children to run. `on_hangup` prepares the files that they reread (child.py: rereads)."""
        self._slots = [Slot(spec, policy or RestartPolicy()) for spec in specs]
        self._observer = observer
        self._selector = selectors.DefaultSelector()
        self._hang_watch = HangWatch(observer)
        self._exit_status: int | None = None
        self._all_ready = False
        self._on_hangup_first = on_hangup
        self._hung_up_at = 0.0
        self._first_signal_at: float | None = None
        self._impatient = False
        self._rolling = RollingRestart(self._slots, self._start, observer.say)

    def run(self) -> int:
        """Run until a signal. Returns the exit status of the process.

        It is 0 after a signal, 1 when the supervisor gave up, 2 when a setting (or the model it names) cannot work.
        Must be called in the main thread.
        """
        with _Signals() as signals:
            self._selector.register(signals, selectors.EVENT_READ, partial(self._on_signals, signals))
            try:
                self._start_due()
                while self._exit_status is None:
                    self._turn(self._next_deadline)
                    self._hang_watch.look(slot.child for slot in self._slots if slot.child and slot.kill_at is None)
                    self._start_due()
                    self._kill_late()
                    self._rolling.proceed()
            finally:
                self._observer.stopping()
                self._stop_all()
                self._selector.close()
        return self._exit_status

    def _start_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.due <= now and self._may_start(slot):
                self._start(slot)

    def _may_start(self, slot: Slot) -> bool:
        if slot.child is not None or not slot.wanted:
            return False
        return all(other.wanted and not other.leaves for other in self._companions(slot))

    def _companions(self, slot: Slot) -> list[Slot]:
        """List the other members of the slot's group."""
        of_group = (other for other in self._slots if slot.spec.group and other.spec.group == slot.spec.group)
        return [other for other in of_group if other is not slot]

    def _start(self, slot: Slot) -> None:
        if slot.parent is not None and slot.parent.fork_again(slot.epoch):
            slot.child = slot.parent
            slot.parent = None
        else:
            try:
                slot.child = child = Child(slot.spec, slot.epoch)
            except OSError as error:
                slot.record_death(None, time.monotonic())
                self._lose(slot, f"{slot.spec.title} cannot be started: {error}", _GAVE_UP)
                return
            handlers = (self._on_exit, self._on_events, self._on_output)
            for descriptor, handler in zip(child.descriptors, handlers, strict=True):
                self._selector.register(descriptor, selectors.EVENT_READ, partial(handler, slot, child))
        slot.epoch += 1
        self._observer.started(slot.spec)

    @property
    def _next_deadline(self) -> float:
        kills = [slot.kill_at for slot in self._slots if slot.kill_at is not None]
        starts = [] if self._next_start is None else [self._next_start]
        return min([*kills, *starts, self._hang_watch.next_look])

    @property
    def _next_start(self) -> float | None:
        return min((slot.due for slot in self._slots if self._may_start(slot)), default=None)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.child is not None and slot.kill_at is not None and slot.kill_at <= now:
                self._observer.say("WARNING", f"{slot.spec.title} did not stop in {slot.patience:g} s: killed")
                slot.kill_at += _SECONDS_AFTER_KILL
                slot.child.kill()

    def _turn(self, deadline: float | None) -> None:
        """Wait for events until `deadline`, and handle them."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            handle: Callable[[], None] = key.data
            handle()

    def _on_output(self, slot: Slot, child: Child) -> None:
        if child in (slot.child, slot.parent):
            self._forward_output(child)

    def _forward_output(self, child: Child) -> bool:
        lines = child.read_output()
        for line in lines or ():
            self._observer.output(line)
        if lines is None:
            self._unwatch(child.output)
        return bool(lines)

    def _on_events(self, slot: Slot, child: Child) -> None:
        if child in (slot.child, slot.parent):
            self._handle_events(slot, child)

    def _handle_events(self, slot: Slot, child: Child) -> bool:
        events = child.read_events()
        for event in events or ():
            self._on_event(slot, child, event)
        if events is None:
            self._unwatch(child.status)
        return bool(events)

    def _on_event(self, slot: Slot, child: Child, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "fatal":
                self._on_fatal(
                    slot, f"{slot.spec.title} cannot work: {event.get('message')}", bool(event.get("may_pass"))
                )
            case "ready":
                child.ready_at = time.monotonic()
                if child.started_at <= self._hung_up_at:  # it has begun with what was there before
                    child.hang_up()
            case "beat":
                return
            case "leave":
                child.leaving = str(event.get("reason"))
                return
            case "missed":
                child.missed = str(event.get("reason"))
                return
            case "died":
                self._on_fork_death(slot, child, int(event["pid"]), int(event["status"]))
                return
        self._observer.event(slot.spec, event)
        if not self._all_ready and all(s.serves for s in self._slots if s.spec.vital):
            self._all_ready = True
            self._observer.all_ready()

    def _on_fatal(self, slot: Slot, reason: str, may_pass: bool) -> None:
        """Handle a child's report that it cannot work; the child ends."""
        if may_pass:
            self._observer.say("ERROR", reason)
        else:
            self._lose(slot, reason, _WRONG_SETTING)

    def _lose(self, slot: Slot, reason: str, status: int) -> None:
        """Give up a child that will never serve. One that is not wanted, or not vital, is no loss."""
        if slot.wanted and slot.spec.vital:
            self._give_up(reason, status)
        else:
            self._observer.say("ERROR", reason)

    def _on_fork_death(self, slot: Slot, child: Child, pid: int, status: int) -> None:
        """Restart a fork that has died, in the child's process, which is still there."""
        if slot.leaves:  # the fork server got SIGTERM, too, and ends
            return
        while self._forward_output(child):
            pass
        slot.child = None
        slot.parent = child
        self._observer.exited(slot.spec, pid)
        if slot.wanted:
            self._on_death(slot, child, status)

    def _on_exit(self, slot: Slot, child: Child) -> None:
        status = child.reap()
        while self._handle_events(slot, child):
            pass
        while self._forward_output(child):
            pass
        for descriptor in child.descriptors:
            self._unwatch(descriptor)
        child.close()
        if slot.parent is child:
            slot.parent = None
        if slot.child is not child:
            return
        slot.child = None
        self._observer.exited(slot.spec, child.pid)
        if slot.kill_at is None and slot.wanted:
            self._on_death(slot, child, status)
        elif slot.kill_at is not None and not slot.wanted:
            self._slots.remove(slot)
        slot.kill_at = None

    def _on_death(self, slot: Slot, child: Child, status: int) -> None:
        now = time.monotonic()
        companions = [other for other in self._companions(slot) if other.wanted]
        if child.leaving and status == 0 and not companions:
            slot.due = now
            self._observer.say("INFO", f"{slot.spec.title} {child.leaving}")
            return
        if child.missed:
            self._wait_for_others(slot, companions, child.missed)
            return
        ready = [one.ready_at for one in (child, *_children(companions))]
        for member in (slot, *companions):
            member.record_death(None if None in ready else max(at for at in ready if at is not None), now)
        for other in companions:
            if other.child is not None:
                other.let_end(now, other.spec.stop_seconds)
        age = f"{now - child.started_at:.1f} s"
        story = f"{slot.spec.title} died after {age} with {describe_exit(status)}"
        story += f"; last error: {child.last_error}" if child.last_error else "; it left no message"
        same = (slot.spec.role, slot.spec.model)
        of_role = (other for other in self._slots if (other.spec.role, other.spec.model) == same and other.wanted)
        if self._exit_status is None and slot.spec.vital and all(other.hopeless for other in of_role):
            self._give_up(
                f"{story}; that is {slot.deaths_in_a_row} deaths in a row, so another start would not help", _GAVE_UP
            )
        else:
            names = ", ".join(other.spec.title for other in companions)
            rest = f", with the rest of its group: {names}" if names else ""
            self._observer.say("ERROR", f"{story}; starting it again in {slot.delay:g} s{rest}")
            for companion in _children(companions):
                companion.terminate()

    def _wait_for_others(self, slot: Slot, companions: Sequence[Slot], missed: str) -> None:
        """Start a child, and the rest of its group, again later: it needs other hosts, which may come at any time."""
        now = time.monotonic()
        for member in (slot, *companions):
            member.wait_for_others(now)
        for companion in companions:
            if companion.child is not None:
                companion.let_end(now, companion.spec.stop_seconds)
                companion.child.terminate()
        delay = slot.policy.longest_delay
        self._observer.say("WARNING", f"{slot.spec.title}: {missed}; it tries again in {delay:g} s")

    def _unwatch(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def _give_up(self, reason: str, status: int) -> None:
        if self._exit_status is None:
            self._observer.say("ERROR", f"giving up: {reason}")
            self._exit_status = status
            for slot in self._slots:
                slot.wanted = False

    def _on_signals(self, signals: _Signals) -> None:
        for number in signals.take():
            if number == signal.SIGHUP and not signals.terminal_is_gone():
                self._on_hangup()
                continue
            now = time.monotonic()
            if self._first_signal_at is None:
                self._first_signal_at = now
                self._observer.say("INFO", f"{signal.Signals(number).name}: stopping in order")
            elif now - self._first_signal_at > _ONE_KEYSTROKE:
                # One keystroke can arrive twice, from the terminal and forwarded by a parent such as make or timeout.
                self._observer.say("WARNING", f"{signal.Signals(number).name} again: stopping at once")
                self._impatient = True
            if self._exit_status is None:
                self._exit_status = 0

    def _on_hangup(self) -> None:
        self._on_hangup_first()
        self._hung_up_at = time.monotonic()
        for child in _children(self._slots):
            child.hang_up()
        self._rolling.begin()

    def _stop_all(self) -> None:
        """Stop role by role, the last first, so that processes that talk to clients end while their backends still
        work."""
        for role in reversed(dict.fromkeys(slot.spec.role for slot in self._slots)):
            self._stop([slot for slot in self._slots if slot.spec.role == role])

    def _stop(self, slots: Sequence[Slot]) -> None:
        deadline = time.monotonic() + max(slot.spec.stop_seconds for slot in slots)
        for slot in slots:
            slot.wanted = False
            slot.kill_at = None
        for child in _children(slots):
            child.terminate()
        while any(_children(slots)) and not self._impatient and time.monotonic() < deadline:
            self._start_due()
            self._turn(min(deadline, self._next_start or deadline))
        if any(_children(slots)):
            self._kill(slots)

    def _kill(self, slots: Sequence[Slot]) -> None:
        for child in _children(slots):
            if not self._impatient:
                self._observer.say(
                    "WARNING", f"{child.spec.title} did not stop in {child.spec.stop_seconds:g} s: killed"
                )
            child.kill()
        deadline = time.monotonic() + _SECONDS_AFTER_KILL
        while any(_children(slots)) and time.monotonic() < deadline:
            self._turn(deadline)


def _children(slots: Sequence[Slot]) -> Iterator[Child]:
    return (child for slot in slots for child in (slot.child, slot.parent) if child is not None)


class _Signals:
    """Turns SIGINT, SIGTERM and SIGHUP into bytes that a selector can wait for, and restores the handlers after."""

    def __enter__(self) -> _Signals:
        self._had_terminal = _has_terminal()
        self._receive, self._send = socket.socketpair()
        for end in (self._receive, self._send):
            end.setblocking(False)
        self._old_descriptor = signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
        watched = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup, on purpose
            watched.append(signal.SIGHUP)
        self._old = {number: signal.signal(number, lambda *_: None) for number in watched}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_descriptor)
        self._receive.close()
        self._send.close()

    def terminal_is_gone(self) -> bool:
        """Whether a SIGHUP means that the terminal is gone, and not the order to restart."""
        return self._had_terminal and not _has_terminal()

    def fileno(self) -> int:
        return self._receive.fileno()

    def take(self) -> bytes:
        """Return the watched signals that have arrived; others (a test's alarm) have handlers of their own."""
        return bytes(number for number in self._receive.recv(64) if number in self._old)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
