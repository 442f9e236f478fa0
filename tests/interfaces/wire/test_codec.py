"""The wire: every message survives the round trip, and corrupt bytes give a message or a WireError, nothing else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from interfaces import (
    AdapterAnswer,
    AdapterFailed,
    AdapterLoaded,
    AdapterOrder,
    AdapterStatus,
    Batch,
    BatchResult,
    Cancel,
    CodecContext,
    CodecFacts,
    Decision,
    DecisionsAnswer,
    DecisionsInquiry,
    Detach,
    Dismissal,
    DropAdapter,
    Goodbye,
    GroupSpec,
    Hello,
    ImageMetadata,
    Inquiry,
    InquiryAnswer,
    Join,
    KeptStep,
    KvMoved,
    KvPiece,
    KvTaken,
    LoadAdapter,
    LoRAOperation,
    LoRARequest,
    LoRAStatus,
    Order,
    OrderAnswer,
    PaintingContext,
    Ping,
    PixelJoin,
    PixelPreview,
    PixelResult,
    PixelStep,
    PooledValues,
    PoolingContext,
    PoolingTask,
    Ready,
    Refusal,
    RequestError,
    Results,
    Retire,
    RowGrammar,
    SamplingParams,
    SchedulingOptions,
    SessionAnswer,
    SessionMedium,
    SessionOrder,
    SharedMemoryArray,
    ShipKv,
    SpeechContext,
    Status,
    Step,
    StepResult,
    Submit,
    TakeKv,
    TensorSpec,
    TextAndVisionContext,
    TextContext,
    TokenRuns,
    Unknown,
    Vectors,
    WeightsAnswer,
    WeightsCommand,
    WeightsOrder,
    WeightsReport,
    WeightsVersion,
    Welcome,
    WireError,
    WorkerGoodbye,
    WorkerHello,
    WorkerLeaves,
    WorkerStatus,
    decode,
    encode,
)
from interfaces.context.grammar_state import GrammarState
from interfaces.messages.hidden_states import HiddenStates
from interfaces.messages.logprob_reports import LogprobReports
from interfaces.wire.codec import PROTOCOL_VERSION, message
from interfaces.wire.declared import Forms
from interfaces.wire.shared_memory import PREFIX, Shareable, SharedMemoryError
from tests.seeds import examples

i31 = st.integers(0, 2**31 - 1)
text = st.text(max_size=20)


def column(dtype: type[np.generic]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(dtype, st.integers(0, 20))


sampling = st.builds(
    SamplingParams,
    top_k=st.integers(-1, 100),
    top_p=st.floats(0, 1),
    temperature=st.floats(0, 2),
    logit_bias=st.dictionaries(i31, st.floats(-5, 5), max_size=3),
    max_new_tokens=st.none() | i31,
    stop=st.lists(text, max_size=3),
    stop_token_ids=st.lists(i31, max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
pixels = hnp.arrays(st.sampled_from([np.float32, np.uint16]), hnp.array_shapes(max_dims=3, max_side=4))
segments = st.builds(
    SharedMemoryArray,
    st.tuples(i31, i31, i31, st.integers(0, 2**64 - 1)).map(lambda n: f"{PREFIX}{n[0]}-{n[1]}-{n[2]}-{n[3]:016x}"),
    st.lists(st.integers(0, 500), max_size=3).map(tuple),
    st.sampled_from(["<f4", "<u2"]),
)
images = st.builds(
    ImageMetadata,
    start_idx=st.integers(0, 3),
    end_idx=st.integers(4, 9),
    pixel_values=pixels | segments,
    image_hash=st.none() | st.integers(-(2**63), 2**64 - 1),
    extras=st.dictionaries(text, hnp.arrays(st.sampled_from([np.int64, np.bool_]), (2, 3)) | segments, max_size=2),
    is_video=st.booleans(),
)
grammar_states = st.builds(
    GrammarState, in_thinking_region=st.booleans(), thinking_end=st.lists(i31), thinking_match_buffer=st.lists(i31)
)
joins = st.builds(
    Join,
    row=i31,
    tokens=column(np.int32),
    prompt_len=i31,
    start=i31,
    sampling=sampling,
    report_from=st.none() | i31,
    images=st.lists(images, max_size=2),
    grammar=st.none() | st.builds(RowGrammar, text, grammar_states, st.lists(i31)),
    adapter=i31,
)
shared_by_contexts = {
    "max_length": st.none(),
    "request_id": text,
    "cache_salt": text,
    "hidden_states": st.booleans(),
    "adapter": text,
    "adapter_digest": text,
}


@st.composite
def pooling_contexts(draw: st.DrawFn) -> PoolingContext:
    texts = draw(st.lists(st.lists(i31, min_size=1, max_size=5), min_size=1, max_size=5))
    context = PoolingContext.of(
        texts,
        draw(st.sampled_from(PoolingTask)),
        dimensions=draw(st.none() | st.integers(1, 2**31 - 1)),
        normalize=draw(st.booleans()),
        activate=draw(st.booleans()),
        request_id=draw(text),
        model_name=draw(text),
    )
    if draw(st.booleans()):
        context.token_types = draw(hnp.arrays(np.int8, len(context.tokens)))
    return context


@st.composite
def pooled_values(draw: st.DrawFn) -> PooledValues:
    lengths = draw(hnp.arrays(np.int32, st.integers(0, 5), elements=st.integers(0, 4)))
    width = draw(st.integers(0, 4))
    return PooledValues(draw(hnp.arrays(np.float32, (int(lengths.sum()), width))), lengths)


def codec_context(frames: int, width: int) -> CodecContext:
    codes = range(width * (frames + 3))
    return CodecContext.of([codes], PoolingTask.DECODE_SPEECH, width=width, left=2, right=1, first_frame=5)


def painting_context(images: int) -> PaintingContext:
    seeds = np.arange(images, dtype=np.int64)
    sizes = {"height": 8, "width": 16, "steps": 2}
    return PaintingContext.of([[1, 2]] * images, PoolingTask.PAINT, seeds=seeds, prompt="a train", **sizes)


contexts = st.one_of(
    st.builds(painting_context, st.integers(1, 3)),
    st.builds(codec_context, st.integers(1, 3), st.integers(1, 7)),
    pooling_contexts(),
    st.builds(TextContext.from_prompt, st.lists(i31, min_size=1, max_size=9), sampling, **shared_by_contexts),
    st.builds(
        TextAndVisionContext.from_prompt,
        st.just([9] * 12),
        sampling,
        vision_token_ids=st.just([9]),
        images=st.lists(images, max_size=1),
        **shared_by_contexts,
    ),
    st.builds(
        SpeechContext.from_prompt,
        st.lists(i31, min_size=1, max_size=9),
        sampling,
        audio_prompt_tokens=column(np.int64),
        buffer_speech_tokens=st.none() | column(np.int64),
        streaming=st.booleans(),
        decoded_length=i31,
        **shared_by_contexts,
    ),
)
reports = st.none() | st.builds(
    LogprobReports,
    owners=column(np.int32),
    positions=column(np.int32),
    chosen=column(np.float32),
    tops=column(np.int32),
    counts=column(np.int32),
    ids=column(np.int32),
    values=column(np.float32),
)
worker_status = st.builds(WorkerStatus, text, i31, i31, i31, i31, i31, i31, i31, st.floats(0, 1e6))
files = st.lists(st.binary(max_size=9), max_size=2)
media = st.lists(st.builds(SessionMedium, files, st.booleans(), st.booleans(), text), max_size=2)
adapters = st.lists(st.builds(AdapterStatus, i31, text, text, text, i31, i31, st.booleans(), i31, i31, i31), max_size=2)
names = st.lists(text, max_size=3)
groups = st.none() | st.builds(GroupSpec, text, text, i31, i31, i31, text)
tensors = st.lists(st.builds(TensorSpec, text, text, st.lists(i31, max_size=3)), max_size=3)
versions = st.none() | st.builds(WeightsVersion, i31, text, text, names, text)
adapter_orders = st.builds(LoRARequest, st.sampled_from(LoRAOperation), text, st.none() | text)
adapter_statuses = st.sampled_from(LoRAStatus)
statuses = st.builds(
    Status,
    incarnation=i31,
    ready=st.booleans(),
    reason=text,
    workers=st.lists(worker_status, max_size=3),
    waiting=i31,
    running=i31,
    max_model_len=i31,
    max_running=i31,
    block_size=i31,
    vocab_size=i31,
    counters=st.dictionaries(text, i31, max_size=3),
    adapters=adapters,
    takes_adapters=st.booleans(),
    codec=st.none() | st.builds(CodecFacts, i31, i31, st.integers(-1, 99), st.integers(-1, 99)),
)
seconds = st.none() | st.floats(0, 1e6)
scheduling = st.builds(SchedulingOptions, text, st.integers(1, 1000), i31, seconds, seconds, text, st.booleans(), text)
pixel_joins = st.builds(PixelJoin, i31, st.builds(painting_context, st.just(1)), st.binary(max_size=9))
messages = st.one_of(
    st.builds(Hello, text, column(np.int32)),
    st.builds(Unknown, i31, column(np.int32), st.booleans()),
    st.builds(Goodbye, text),
    st.builds(Cancel, column(np.int32)),
    st.builds(Detach, column(np.int32)),
    st.builds(Submit, i31, contexts, scheduling, st.booleans()),
    st.builds(
        Results,
        incarnation=i31,
        handles=column(np.int32),
        tokens=column(np.int32),
        finished=column(np.int8),
        logprobs=st.none() | column(np.float32),
        cached=st.dictionaries(i31, i31, max_size=3),
        errors=st.dictionaries(i31, st.builds(RequestError, text, text), max_size=3),
        queued=st.dictionaries(i31, i31, max_size=3),
        versions=st.dictionaries(i31, st.dictionaries(i31, text, max_size=2), max_size=3),
        reports=reports,
        number=st.integers(0, 2**63 - 1),
    ),
    st.builds(Vectors, i31, i31, i31, pooled_values(), i31, st.integers(0, 2**63 - 1), i31),
    st.builds(Batch, i31, i31, i31, st.lists(pooling_contexts(), max_size=3)),
    st.builds(
        BatchResult,
        incarnation=i31,
        epoch=i31,
        index=i31,
        number=i31,
        parts=st.lists(st.none() | pooled_values(), max_size=3),
        errors=st.dictionaries(i31, text, max_size=3),
        device_us=i31,
    ),
    st.builds(PixelStep, i31, i31, i31, column(np.int32), column(np.int32), st.lists(pixel_joins, max_size=2)),
    st.builds(
        PixelResult,
        incarnation=i31,
        epoch=i31,
        index=i31,
        number=i31,
        finished=column(np.int32),
        images=st.lists(pooled_values(), max_size=2),
        passes=column(np.int32),
        errors=st.dictionaries(i31, text, max_size=3),
        device_us=i31,
        previews=st.lists(st.builds(PixelPreview, i31, i31, pooled_values()), max_size=2),
        kept=st.lists(st.builds(KeptStep, i31, i31, st.binary(max_size=9)), max_size=2),
    ),
    st.builds(WorkerLeaves, i31, i31),
    st.builds(Dismissal, i31),
    st.builds(ShipKv, i31, i31, i31, column(np.int32)),
    st.builds(KvPiece, i31, i31, i31, i31, pixels),
    st.builds(TakeKv, i31, i31, i31, column(np.int32), pixels),
    st.builds(KvTaken, i31, i31, i31, i31, st.booleans()),
    st.builds(Order, i31, i31, st.lists(text, max_size=3)),
    st.builds(OrderAnswer, i31, i31, text, i31),
    st.builds(
        SessionOrder, i31, i31, text, text, text, st.booleans(), st.floats(0, 1e6), column(np.int32), i31, media, i31
    ),
    st.builds(SessionAnswer, i31, i31, text, column(np.int32), i31, media, i31),
    st.builds(AdapterOrder, i31, adapter_orders, st.booleans(), st.booleans()),
    st.builds(AdapterAnswer, i31, i31, adapter_statuses, text, i31, adapters),
    st.builds(LoadAdapter, i31, i31, i31, text, text),
    st.builds(DropAdapter, i31, i31, i31),
    st.builds(AdapterLoaded, i31, i31, i31, i31, text, i31, i31),
    st.builds(AdapterFailed, i31, i31, i31, i31, text, text, st.booleans()),
    st.builds(WeightsOrder, i31, i31, text, text, names, i31, names, groups, i31, tensors, text, i31, st.booleans()),
    st.builds(WeightsAnswer, i31, i31, text, text, st.booleans(), column(np.float32), st.lists(i31, max_size=3), i31),
    st.builds(WeightsCommand, i31, i31, i31, i31, versions, names, groups, i31, tensors, text, text, i31),
    st.builds(WeightsReport, i31, i31, i31, i31, text, text, column(np.float32), st.lists(i31, max_size=3)),
    st.builds(Inquiry, text),
    st.builds(InquiryAnswer, i31, st.lists(text), statuses),
    st.builds(DecisionsInquiry, i31, st.lists(text)),
    st.builds(DecisionsAnswer, i31, i31, st.lists(st.builds(Decision, i31, i31, st.floats(0, 1e10), i31, i31, text))),
    st.builds(Ready, i31, i31, i31, column(np.int32), column(np.int64), column(np.int32), st.dictionaries(i31, text)),
    st.builds(
        KvMoved,
        incarnation=i31,
        epoch=i31,
        index=i31,
        tickets=column(np.int32),
        blocks=column(np.int32),
        seconds=column(np.float32),
        skipped=column(np.int32),
        broken=column(np.int32),
        full=st.booleans(),
    ),
    st.builds(Retire, i31, text, st.booleans()),
    st.builds(Ping, i31),
    st.builds(Welcome, text, i31, i31),
    st.builds(Refusal, text, text, st.booleans()),
    st.builds(WorkerGoodbye, i31, i31),
    statuses,
    st.builds(WorkerHello, text, i31, i31, i31, i31, i31, i31, i31, i31, text, text, text, tasks=st.lists(text)),
    st.builds(
        Step,
        incarnation=i31,
        epoch=i31,
        step=i31,
        rows=column(np.int32),
        ntok=st.none() | column(np.int32),
        new_blocks=hnp.arrays(np.int32, st.tuples(st.integers(0, 5), st.just(3))),
        drop=column(np.int32),
        joins=st.lists(joins, max_size=3),
        ahead=st.none() | column(np.int32),
        save=st.none() | hnp.arrays(np.int32, st.tuples(st.integers(0, 5), st.just(3))),
        load=st.none() | hnp.arrays(np.int32, st.tuples(st.integers(0, 5), st.just(3))),
    ),
    st.builds(
        StepResult,
        incarnation=i31,
        epoch=i31,
        index=i31,
        step=i31,
        rows=column(np.int32),
        tokens=column(np.int32),
        logprobs=st.none() | column(np.float32),
        errors=st.dictionaries(i31, text, max_size=3),
        device_us=i31,
        hidden=st.none() | st.builds(HiddenStates, column(np.int32), column(np.int32), column(np.float32)),
        reports=reports,
        more=st.none() | st.builds(TokenRuns, column(np.int32), column(np.int32), column(np.int32)),
    ),
)


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, list):
        assert isinstance(right, list)
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, dict):
        assert isinstance(right, dict)
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_same(value, right[key])
    elif is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right


@settings(max_examples=examples(100), deadline=None)
@given(messages)
def test_every_message_survives_the_round_trip(sent: object) -> None:
    assert_same(sent, decode(encode(sent), ipc_peer=True))


@settings(max_examples=examples(170), deadline=None)
@given(messages, st.data())
def test_corrupt_bytes_give_a_message_or_a_wire_error(sent: object, data: st.DataObject) -> None:
    wire = bytearray(encode(sent))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "extend"]))
        position = data.draw(st.integers(0, max(0, len(wire) - 1)))
        if kind == "flip" and wire:
            wire[position] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del wire[position:]
        else:
            wire += data.draw(st.binary(max_size=20))
    with contextlib.suppress(WireError):
        assert type(decode(bytes(wire), ipc_peer=True)).__module__.startswith("interfaces.messages.")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(wire: bytes) -> None:
    with pytest.raises(WireError):
        decode(wire)


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([99, 1, "replica"], "protocol version"),
        ([PROTOCOL_VERSION, 255], "unknown message tag"),
        ([PROTOCOL_VERSION, [], "x"], "unknown message tag"),
        ([PROTOCOL_VERSION, 1], "Hello"),
        ([PROTOCOL_VERSION, 1, 7, b""], r"Hello\.replica: expected str, got int"),
        ([PROTOCOL_VERSION, 3, [1, 2]], r"Cancel\.handles: expected bytes, got array"),
        ("text", "a message is an array"),
    ],
)
def test_errors_name_what_is_wrong(parts: object, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(msgpack.packb(parts))


PLACEHOLDER = SharedMemoryArray(f"{PREFIX}1-2-3-{'0' * 16}", (1000, 1000), "<f4")


def submit_with(pixel_values: Shareable) -> Submit:
    image = ImageMetadata(start_idx=0, end_idx=3, pixel_values=pixel_values, image_hash=5)
    return Submit(1, TextAndVisionContext.from_prompt([9] * 3, SamplingParams(), vision_token_ids=[9], images=[image]))


def pixels_in_form(**changes: object) -> bytes:
    """A message with an image whose array is spelled like that."""
    parts = msgpack.unpackb(encode(submit_with(np.zeros(2, np.float32))), strict_map_key=False)
    form = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": (2,), b"data": bytes(8)}
    (path,) = [i for i, part in enumerate(parts[3]) if type(part) is list and part and type(part[0]) is list]
    (place,) = [i for i, part in enumerate(parts[3][path][0]) if type(part) is dict and part]
    assert parts[3][path][0][place] == form | {b"shape": [2]}
    parts[3][path][0][place] = form | {name.encode(): value for name, value in changes.items()}
    return bytes(msgpack.packb(parts))


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "|O"},
        {"type": "<U4"},
        {"type": [["a", "<f4"]]},
        {"type": "nonsense"},
        {"kind": b"O", "type": "|O", "data": b"\x80\x04N."},
        {"shape": (3,)},
        {"shape": (-1,)},
        {"shape": (2**62, 2**62)},
        {"nd": False},
        {"type": "<f8"},
        {"data": "text"},
    ],
)
def test_arrays_of_other_kinds_and_shapes_are_refused(changes: dict[str, object]) -> None:
    assert isinstance(decode(pixels_in_form()), Submit)
    with pytest.raises(WireError, match=r"Submit\.context"):
        decode(pixels_in_form(**changes))


@pytest.mark.parametrize("column", [b"", b"\1\0\0\0", b"\1\0\0\0\xff\xff\xff\xff"])
def test_columns_are_the_bytes_of_their_numbers(column: bytes) -> None:
    expected = [int.from_bytes(column[i : i + 4], "little", signed=True) for i in range(0, len(column), 4)]
    assert decode(msgpack.packb([PROTOCOL_VERSION, 3, column])).handles.tolist() == expected


@pytest.mark.parametrize("numbers", [np.arange(100_000, dtype=np.int32), np.arange(200_000, dtype=np.int32)[::2]])
def test_large_columns_survive_too(numbers: np.ndarray) -> None:
    assert_same(Cancel(numbers), decode(encode(Cancel(numbers))))


@pytest.mark.parametrize("column", [b"\1\0\0", "1234", None, [1], {b"nd": True}])
def test_what_is_no_column_is_refused(column: object) -> None:
    with pytest.raises(WireError, match=r"Cancel\.handles: (expected bytes|buffer size must be a multiple)"):
        decode(msgpack.packb([PROTOCOL_VERSION, 3, column]))


def test_triples_come_in_threes() -> None:
    nothing = np.empty(0, np.int32)
    parts = msgpack.unpackb(encode(Step(1, 2, 3, nothing, None, np.array([[4, 5, 6]], np.int32), nothing, [])))
    place = parts.index(bytes([4, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0]))
    parts[place] += bytes(4)
    with pytest.raises(WireError, match=r"Step\.new_blocks: expected triples of int32, got 4 numbers"):
        decode(msgpack.packb(parts))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (np.zeros(2, np.int64), "an array of int64 and shape"),
        (np.zeros((2, 1), np.int32), r"an array of int32 and shape \(2, 1\)"),
        (np.zeros(2, ">i4"), "an array of >i4 and shape"),
        ([1, 2], "list has no place on the wire where an array is declared"),
    ],
)
def test_what_is_declared_as_a_column_must_be_one(wrong: Any, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        encode(Cancel(wrong))


def test_what_is_declared_as_triples_must_be_triples() -> None:
    nothing = np.empty(0, np.int32)
    with pytest.raises(TypeError, match=r"an array of int32 and shape \(3, 4\)"):
        encode(Step(1, 2, 3, nothing, None, np.zeros((3, 4), np.int32), nothing, []))


def test_arrays_in_shared_memory_are_passed_on_unopened_and_only_from_this_host() -> None:
    wire = encode(submit_with(PLACEHOLDER))
    assert len(wire) < 1000
    with pytest.raises(WireError, match=r"Submit\.context\.images\[0\]\.pixel_values: .* peers on this host only"):
        decode(wire)
    received = decode(wire, ipc_peer=True)
    assert received.context.images[0].pixel_values == PLACEHOLDER
    assert encode(received) == wire
    with pytest.raises(SharedMemoryError, match="cannot be opened"):
        _ = received.context.images[0].pixels


@pytest.mark.parametrize("name", ["tokenyard-1-2-3-../../etc/passwd", "../etc/passwd", "x" * 32])
def test_segments_of_other_names_are_refused(name: str) -> None:
    honest = PLACEHOLDER.name.encode()
    wire = encode(submit_with(PLACEHOLDER)).replace(honest, name.encode().ljust(len(honest), b"f"))
    with pytest.raises(WireError, match="not the name of a segment"):
        decode(wire, ipc_peer=True)


def test_contexts_of_different_kinds_are_told_apart() -> None:
    submit = submit_with(np.zeros((3, 2, 2), np.float32))
    parts = msgpack.unpackb(encode(submit), strict_map_key=False)
    wrong: list[object] = [parts[3][1:], ["other", *parts[3][1:]], [[], *parts[3][1:]], [], {}, None]
    for context in wrong:
        with pytest.raises(WireError, match=r"Submit\.context(\[0\])?: (expected|invalid value)"):
            decode(msgpack.packb([*parts[:3], context, *parts[4:]]))
    for cut in (parts[3][:-1], [*parts[3], None]):
        with pytest.raises(WireError, match=r"Submit\.context: expected array of at (most|least) length \d+"):
            decode(msgpack.packb([*parts[:3], cut, *parts[4:]]))

    @dataclass
    class Left:
        wire_tag: ClassVar[str] = "side"
        value: int

    @dataclass
    class Right:
        wire_tag: ClassVar[str] = "side"
        name: str
        other: str

    with pytest.raises(TypeError, match="Left, Right need a wire_tag each, all different"):
        Forms(positional=True, copy=False, ipc_peer=False).form(Left | Right)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000 + b"\x01")


def test_objects_without_a_place_on_the_wire_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="not a message"):
        encode(object())
    with pytest.raises(TypeError, match="no place on the wire"):
        encode(Hello(replica=object()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no place on the wire"):
        encode(Cancel(np.array([object()])))


def test_a_tag_belongs_to_one_class() -> None:
    with pytest.raises(TypeError, match="taken by Hello"):

        @message(1)
        @dataclass
        class Other:
            value: int


def test_interfaces_stays_light() -> None:
    heavy = ("torch", "zmq", "starlette", "transformers")
    code = f"import sys, interfaces; print([name for name in {heavy!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"
