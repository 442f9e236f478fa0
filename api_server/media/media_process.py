"""`python -m api_server.media.media_process`: decodes and processes images beside the API process.

Each image is processed in a child of its own, forked from this small process that has loaded the model's image
processor. Limits on processor time and memory apply to the child, and exceeding them kills only the child. Reads
requests from standard input, and writes answers to standard output (`protocol.py`).
"""

from __future__ import annotations

import dataclasses
import gc
import os
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from api_server.media.decode import MOST_PIXELS_TOGETHER, ImageRefused, decoded, size_of
from api_server.media.protocol import Answer, Job, Start, packed
from shared.hidden_torch import hide_torch
from shared.liveness import become, end_with_parent, limit_memory
from shared.pipe_messages import message_unpacker
from shared.resources import usable_cores

if TYPE_CHECKING:
    from api_server.media.processors import Processor

CPU_SECONDS = 20.0
# Limit for a child that waits instead of computing.
WALL_SECONDS = 60.0
# Memory of a child beyond that of this process.
MEMORY_BYTES = 2 << 30
# Images processed at once, if there are as many cores.
CHILDREN = 4
# Processing yields to token generation.
NICENESS = 5

# Exit code of a child that met an error of ours.
_FAILED = 3
_TOO_SLOW = f"takes more than {CPU_SECONDS:g} s of processor time to read: send a smaller one"
_TOO_LARGE = f"takes more than {MEMORY_BYTES >> 20} MB of memory to read: send a smaller one"
_CRASHED = "cannot be read: its decoder crashed, or ran out of memory"


@dataclass
class _Child:
    """One job. `number` names it to the API process; `words` is the child's output so far."""

    number: int
    pid: int
    output: int
    deadline: float
    words: bytearray = field(default_factory=bytearray)


class MediaProcess:
    """Does the jobs that arrive; `run` ends when the API process closes its end."""

    def __init__(self, processor: Processor, answers: Any) -> None:
        self._processor = processor
        self._answers = answers
        self._waiting: deque[Job] = deque()
        self._children: dict[int, _Child] = {}
        self._at_once = max(1, min(CHILDREN, usable_cores()))
        self._selector = selectors.DefaultSelector()

    def run(self, requests: int, unpacker: msgpack.Unpacker) -> None:
        self._selector.register(requests, selectors.EVENT_READ)
        self._waiting.extend(unpacker)
        while True:
            while self._waiting and len(self._children) < self._at_once:
                self._start(self._waiting.popleft())
            for key, _ in self._selector.select(timeout=1.0):
                data = os.read(key.fd, 1 << 20)
                if key.fd != requests:
                    self._hear(self._children[key.fd], data)
                elif not data:
                    return
                else:
                    unpacker.feed(data)
                    self._waiting.extend(unpacker)
            for child in list(self._children.values()):
                if time.monotonic() > child.deadline:
                    os.kill(child.pid, signal.SIGKILL)

    def _start(self, job: Job) -> None:
        output, child_output = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(output)
            self._do(job, child_output)
        os.close(child_output)
        self._children[output] = _Child(job["number"], pid, output, time.monotonic() + WALL_SECONDS)
        self._selector.register(output, selectors.EVENT_READ)

    def _do(self, job: Job, output: int) -> None:
        """Runs in the child; does not return."""
        try:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the child
            end_with_parent(signal.SIGKILL)  # else it would write into shared memory that has no owner
            limit_memory(MEMORY_BYTES)
            os.nice(NICENESS)
            answer = outcome(self._processor, job)
            with os.fdopen(output, "wb") as stream:
                stream.write(msgpack.packb(answer))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(_FAILED)  # after any exception: a child must not continue the parent's loop

    def _hear(self, child: _Child, data: bytes) -> None:
        if data:
            child.words += data
            return
        self._selector.unregister(child.output)
        os.close(child.output)
        del self._children[child.output]
        _, status = os.waitpid(child.pid, 0)
        answer: Answer = msgpack.unpackb(child.words) if status == 0 else {"error": _why(status)}
        send(self._answers, answer | {"number": child.number})


def outcome(processor: Processor, job: Job) -> Answer:
    """The results of a job, or the `error`."""
    try:
        if job["measure"]:
            return _measured(job["measure"])
        found = processor.process(decoded(job["image"]), job["detail"], job["pixels"])
        names = job["segments"]
        return {"run": found.run, "arrays": {name: packed(array, names) for name, array in found.arrays.items()}}
    except ImageRefused as refused:
        return {"error": str(refused)}
    except MemoryError:
        return {"error": _TOO_LARGE}


def _measured(images: list[bytes]) -> Answer:
    counts: list[int] = []
    for i, data in enumerate(images):
        try:
            width, height = size_of(data)
        except ImageRefused as refused:
            return {"error": str(refused), "index": i}
        counts.append(width * height)
        if sum(counts) > MOST_PIXELS_TOGETHER:
            together = f"{sum(counts)} pixels; at most {MOST_PIXELS_TOGETHER} are possible in one request"
            return {"error": f"and those before it have {together}: send fewer or smaller ones", "index": i}
    return {"counts": counts}


def _why(status: int) -> str:
    number = os.waitstatus_to_exitcode(status)
    if number == _FAILED:
        return "cannot be read: the image processor failed on it"
    if number == -signal.SIGKILL:
        return f"cannot be read: it took over {WALL_SECONDS:g} s, or too much memory; send a smaller one"
    return _TOO_SLOW if number == -signal.SIGPROF else _CRASHED


def send(answers: Any, message: Any) -> None:
    answers.write(msgpack.packb(message))
    answers.flush()


def main() -> None:
    become("media_process")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process ends this one
    warnings.simplefilter("ignore")  # they are about metadata of strangers' files
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's prints must not mix with answers
    hide_torch()
    from api_server.media.processors import NoProcessor, Processor

    unpacker = message_unpacker()
    requests = sys.stdin.fileno()
    for start in _first(requests, unpacker):
        try:
            processor = Processor(start["model"], start["most_tokens"])
        except NoProcessor as error:
            send(answers, {"error": str(error)})
            continue
        send(answers, dataclasses.asdict(processor.facts))
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page
        MediaProcess(processor, answers).run(requests, unpacker)


def _first(requests: int, unpacker: msgpack.Unpacker) -> list[Start]:
    """The first message; empty if there is none."""
    while data := os.read(requests, 1 << 20):
        unpacker.feed(data)
        for start in unpacker:
            return [start]
    return []


if __name__ == "__main__":
    main()
