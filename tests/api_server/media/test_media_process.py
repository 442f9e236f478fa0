"""The media process: limits on each image that cost no other image, and answers by their numbers."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image

from api_server.media.protocol import packed, unpacked
from interfaces import Segments, SharedMemoryArray
from interfaces.wire.shared_memory import mapped
from shared.pipe_messages import message_unpacker

PROGRAM = """
import os, signal, sys
from functools import partial
import numpy as np
from api_server.media import media_process
from api_server.media.processors import Arrays
from shared.pipe_messages import message_unpacker

media_process.CPU_SECONDS = 0.5
media_process.WALL_SECONDS = float(sys.argv[1])
media_process.MEMORY_BYTES = 300 << 20

class Processor:
    '''Behaves by the width of the image.'''
    def process(self, image, detail, pixels):
        if image.width == 1:
            while True:
                pass
        if image.width == 2:
            np.ones(1 << 30)
        if image.width == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if image.width == 4:
            signal.pause()
        if image.width == 5:
            raise RuntimeError("a bug")
        return Arrays({"pixel_values": np.full((image.height, 1000), image.width, np.float32)}, "run")

answers = os.fdopen(os.dup(1), "wb")
media_process.MediaProcess(partial(media_process.outcome, Processor()), answers).run(0, message_unpacker())
"""


class Process:
    """A media process whose processor does what the width of an image says."""

    def __init__(self, wall_seconds: float) -> None:
        command = [sys.executable, "-c", PROGRAM, str(wall_seconds)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._unpacker = message_unpacker()

    def ask(self, number: int, width: int, height: int = 2, segments: list[str] | None = None) -> None:
        out = io.BytesIO()
        Image.new("RGB", (width, height)).save(out, "PNG")
        job = {"number": number, "measure": [], "image": out.getvalue(), "detail": "auto", "pixels": {}}
        assert self.child.stdin is not None
        self.child.stdin.write(msgpack.packb(job | {"segments": segments or []}))
        self.child.stdin.flush()

    def answers(self, count: int) -> dict[int, dict[str, Any]]:
        assert self.child.stdout is not None
        found: dict[int, dict[str, Any]] = {}
        while len(found) < count:
            data = os.read(self.child.stdout.fileno(), 1 << 20)
            assert data, "the process has ended"
            self._unpacker.feed(data)
            found |= {answer["number"]: answer for answer in self._unpacker}
        return found


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    """So patient that a busy machine ends no image, unless a test wants another time."""
    made = Process(getattr(request, "param", 120.0))
    yield made
    made.child.kill()
    made.child.wait(60)


def test_an_image_that_goes_too_far_costs_no_other(process: Process) -> None:
    for number, width in enumerate((1, 20, 2, 21, 3, 22, 5, 23)):
        process.ask(number, width)
    found = process.answers(8)
    for number in (1, 3, 5, 7):
        array = unpacked(found[number]["arrays"]["pixel_values"])
        assert (mapped(array) == 20 + number // 2).all()
    # On a busy machine the clock on the wall may strike first.
    assert any(part in found[0]["error"] for part in ("of processor time", "took over"))
    assert "of memory to read" in found[2]["error"]
    assert "its decoder crashed" in found[4]["error"]
    assert "the image processor failed on it" in found[6]["error"]
    process.ask(11, 30)
    assert process.answers(1)[11]["run"] == "run"


@pytest.mark.parametrize("process", [0.5], indirect=True)
def test_an_image_that_waits_is_ended_by_the_clock(process: Process) -> None:
    for number in (1, 2):
        process.ask(number, 4)
        assert "took over 0.5 s" in process.answers(1)[number]["error"]


def test_it_ends_with_its_input(process: Process) -> None:
    process.ask(1, 9)
    process.answers(1)
    assert process.child.stdin is not None
    process.child.stdin.close()
    assert process.child.wait(60) == 0


def test_large_arrays_lie_in_the_segments_of_the_owner(process: Process) -> None:
    segments = Segments()
    names = [segments.reserve(), segments.reserve()]
    process.ask(1, 7, 100, names)
    array = unpacked(process.answers(1)[1]["arrays"]["pixel_values"])
    assert isinstance(array, SharedMemoryArray)
    assert array.name == names[0]
    segments.free(names[1:])
    assert (array.open() == 7).all()
    assert array.shape == (100, 1000)
    other = segments.hold(array)
    segments.release([array])
    assert len(segments) == 1
    segments.release([other])  # type: ignore[list-item]
    assert len(segments) == 0
    with pytest.raises(ValueError, match="cannot be opened"):
        array.open()


def test_a_killed_process_takes_its_children_along(process: Process) -> None:
    process.ask(1, 4)
    children = Path(f"/proc/{process.child.pid}/task/{process.child.pid}/children")
    deadline = time.monotonic() + 60
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.child.pid, signal.SIGKILL)
    process.child.wait(60)
    while is_running(found[0]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_arrays_without_a_segment_travel_as_bytes() -> None:
    for array in (np.arange(6, dtype=np.int64).reshape(2, 3), np.ones((300, 300), np.float32), np.zeros((0, 3))):
        assert (mapped(unpacked(packed(array, []))) == array).all()
    assert isinstance(packed(np.ones((300, 300), np.float32), ["no-segment/of-ours"])[0], bytes)
