"""`python -m benchmarks.wire`: what the wire between our processes costs, as a table.

Times are the best of several rounds of CPU time in one thread: what the code costs when nothing else runs.
`--kills N` instead passes arrays through shared memory for N rounds in which one side is killed at a random moment,
and tells whether a sweep left anything.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from interfaces import (
    ImageMetadata,
    Join,
    SamplingParams,
    Step,
    StepResult,
    Submit,
    TextAndVisionContext,
    TextContext,
    WireError,
    decode,
    encode,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from interfaces.wire.shared_memory import DIRECTORY, MESSAGE_THRESHOLD, PREFIX, Segments, sweep_segments

ROWS = 256
PROMPT_TOKENS = 1000
ARRAY_BYTES = 8_000_000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of which the best counts (%(default)s)")
    parser.add_argument("--kills", type=int, default=0, help="rounds with a kill, instead of the table")
    options = parser.parse_args(argv)
    if options.kills:
        return _kills(options.kills)
    Console().print(_table(options.rounds))
    return 0


def _table(rounds: int) -> Table:
    table = Table("message", "bytes", "encode, us", "decode, us", "both, us", title="the wire")
    rows = np.arange(ROWS, dtype=np.int32)
    step = Step(1, 0, 5, rows, None, np.zeros((16, 3), np.int32), np.empty(0, np.int32), [])
    result = StepResult(1, 0, 0, 5, rows, rows, None, {}, 100)
    sampling = SamplingParams(stop_token_ids=[1, 2], max_new_tokens=100)
    submit = Submit(1, TextContext.from_prompt(range(PROMPT_TOKENS), sampling))
    for name, message in (
        (f"Step, {ROWS} rows", step),
        (f"StepResult, {ROWS} rows", result),
        (f"Submit, {PROMPT_TOKENS} tokens", submit),
    ):
        data = encode(message)
        encoding = _microseconds(partial(encode, message), rounds)
        decoding = _microseconds(partial(decode, data), rounds)
        table.add_row(name, f"{len(data)}", f"{encoding:.1f}", f"{decoding:.1f}", f"{encoding + decoding:.1f}")
    array = np.random.default_rng(0).random(ARRAY_BYTES // 4, np.float32)
    for name, shared in (("8 MB array, inline", False), ("8 MB array, shared memory", True)):
        table.add_row(name, *_array_row(array, shared, rounds))
    for size in (MESSAGE_THRESHOLD, ARRAY_BYTES):
        for name, segments in (("inline", None), ("shared memory", Segments())):
            passing = _microseconds(partial(_pass_image, array[: size // 4], segments), rounds)
            table.add_row(f"image of {size} bytes to the worker, {name}", "", "", "", f"{passing:.0f}")
    return table


def _pass_image(pixels: np.ndarray, segments: Segments | None) -> float:
    """From the replica's context to the numbers in the worker; the scheduler reads and writes it in between."""
    image = ImageMetadata(start_idx=0, end_idx=1, pixel_values=pixels)
    context = TextAndVisionContext.from_prompt([9], SamplingParams(), vision_token_ids=[9], images=[image])
    if segments is not None:
        context.share_arrays(segments)
    received = decode(encode(Submit(1, context)), ipc_peer=True).context
    join = Join(0, np.zeros(1, np.int32), 1, 0, received.sampling_params, images=received.images)
    none = np.empty(0, np.int32)
    step = Step(1, 0, 1, none, None, none.reshape(0, 3), none, [join])
    result = float(decode(encode(step), ipc_peer=True).joins[0].images[0].pixels.sum())
    if segments is not None:
        segments.release_all()
    return result


def _array_row(array: np.ndarray, shared: bool, rounds: int) -> tuple[str, str, str, str]:
    encoder = msgpack_numpy_encoder(use_shared_memory=shared, shared_memory_threshold=1)
    decoder = msgpack_numpy_decoder(np.ndarray, copy=False, ipc_peer=True)

    def encode_and_release() -> None:
        encoder(array)
        encoder.segments.release(encoder.segments.take())

    data = encoder(array)
    encoder.segments.take()
    # Summing reads every page: without it a mapping would look free.
    reading = _microseconds(lambda: decoder(data).sum(), rounds) - _microseconds(array.sum, rounds)
    encoding = _microseconds(encode_and_release, rounds)
    reading = max(0.0, reading)
    return f"{len(data)}", f"{encoding:.0f}", f"{reading:.0f}", f"{encoding + reading:.0f}"


def _microseconds(work: Callable[[], object], rounds: int) -> float:
    timer = timeit.Timer(work, timer=time.thread_time)
    number = max(1, int(0.01 / max(1e-7, timer.timeit(1))))
    return min(timer.repeat(rounds, number)) / number * 1e6


def _kills(rounds: int) -> int:
    before = {path.name for path in DIRECTORY.glob(f"{PREFIX}*")}
    passed = 0
    for _ in range(rounds):
        passed += _round_with_a_kill(random.uniform(0.01, 0.3))
        sweep_segments()
        left = {path.name for path in DIRECTORY.glob(f"{PREFIX}*")} - before
        if left:
            print(f"a sweep left {len(left)} segments: {sorted(left)[0]}...")
            return 1
    print(f"{rounds} rounds, {passed} arrays read, nothing left in {DIRECTORY}")
    return 0


def _round_with_a_kill(seconds: float) -> int:
    """Arrays that were read before one side was killed."""
    wires, readings = os.pipe(), os.pipe()
    producer = os.fork() or _produce(wires)
    consumer = os.fork() or _consume(wires, readings[1])
    for descriptor in (*wires, readings[1]):
        os.close(descriptor)
    time.sleep(seconds)
    os.kill(random.choice((producer, consumer)), signal.SIGKILL)
    with os.fdopen(readings[0], "rb") as stream:
        read = len(stream.read())
    os.kill(producer, signal.SIGKILL)
    for child in (producer, consumer):
        os.waitpid(child, 0)
    return read


def _produce(wires: tuple[int, int]) -> int:
    os.close(wires[0])
    encoder = msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=1)
    try:
        for i in range(10_000):
            wire = encoder(np.full((3, 64, 64), i, np.float32))
            os.write(wires[1], len(wire).to_bytes(4, "little") + wire)
    finally:
        os._exit(0)


def _consume(wires: tuple[int, int], readings: int) -> int:
    os.close(wires[1])
    decoder = msgpack_numpy_decoder(np.ndarray, ipc_peer=True)
    stream = os.fdopen(wires[0], "rb")
    try:
        while len(header := stream.read(4)) == 4:
            try:
                decoder(stream.read(int.from_bytes(header, "little")))
            except WireError:
                continue
            os.write(readings, b".")
    finally:
        os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
