"""The codec for every type that is no message: round trips, corruption, refusals, shared memory forms, pickling."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import resource
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from pydantic import BaseModel

import interfaces
from interfaces.base.log_probabilities import LogProbabilities
from interfaces.base.request_id import RequestID
from interfaces.base.status import BatchType, GenerationStatus, InputModality, SchedulerStatus
from interfaces.context.codec_windows import ClipContext, CodecContext, CodecFacts
from interfaces.context.grammar_state import GrammarEnforcementSnapshot, GrammarState
from interfaces.context.images import ImageMetadata
from interfaces.context.index_view import IndexState
from interfaces.context.media import PixelContext, SpeechContext
from interfaces.context.painting import PaintingContext
from interfaces.context.pooling import PoolingContext, PoolingTask
from interfaces.context.protocols import SpecDecodingState
from interfaces.context.stopping import EOSTracker
from interfaces.context.synthesis import SynthesisContext
from interfaces.context.text import Progress, TextContext
from interfaces.context.tokens import Range, TokenBuffer
from interfaces.context.vision import TextAndVisionContext
from interfaces.pipelines.audio import (
    AudioGenerationMetadata,
    AudioGenerationOutput,
    AudioGenerationRequest,
    AudioGenerationResponse,
    AudioGeneratorOutput,
)
from interfaces.pipelines.generation_output import (
    GenerationOutput,
    OutputTextContent,
    OutputVideoContent,
    RefusalContent,
)
from interfaces.pipelines.open_responses import OpenResponsesRequest, OpenResponsesRequestBody
from interfaces.pipelines.parsers import (
    ParsedReasoningDelta,
    ParsedToolCall,
    ParsedToolCallDelta,
    ParsedToolResponse,
    ReasoningSpan,
)
from interfaces.pipelines.task import PipelineTask
from interfaces.request.chat import TextContentPart, TextGenerationRequestMessage, TextGenerationResponseFormat
from interfaces.request.lora import LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus, LoRAType
from interfaces.request.requests import EmbeddingsGenerationRequest, PixelGenerationRequest, TextGenerationRequest
from interfaces.request.sampling import SamplingParams, SamplingParamsGenerationConfigDefaults, SamplingParamsInput
from interfaces.result.outputs import EmbeddingsOutput, TextGenerationOutput
from interfaces.result.pooled_values import PooledValues
from interfaces.result.results import RequestError, SchedulerResult
from interfaces.wire.codec import WireError, decode, msgpack_numpy_decoder, msgpack_numpy_encoder
from tests.seeds import examples

T = TypeVar("T")
encode = msgpack_numpy_encoder()

i31 = st.integers(0, 2**31 - 1)
ids = st.lists(i31, max_size=4)
text = st.text(max_size=12)
number = st.floats(-10, 10)
floats = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), elements=st.floats(-1, 1, width=32)
)
int64s = hnp.arrays(np.int64, st.integers(0, 5), elements=st.integers(-(2**60), 2**60))
request_id = text.map(RequestID)
sampling = st.builds(
    SamplingParams,
    top_k=st.integers(-1, 9),
    temperature=st.floats(0, 2),
    logit_bias=st.dictionaries(i31, number, max_size=2),
    stop=st.none() | st.lists(text, max_size=2),
    stop_token_ids=st.none() | ids,
    seed=st.integers(0, 2**64 - 1),
)
logprobs = st.builds(LogProbabilities, st.lists(number, max_size=2), st.lists(st.dictionaries(i31, number), max_size=2))
status = st.sampled_from(GenerationStatus)
trackers = st.builds(
    EOSTracker,
    eos_token_ids=st.sets(i31, max_size=3),
    eos_sequences=st.lists(ids, max_size=2),
    eos_stop_strings=st.lists(text, max_size=2),
    text_tail=text,
)


@st.composite
def token_buffers(draw: st.DrawFn) -> TokenBuffer:
    buffer = TokenBuffer(np.array(draw(st.lists(i31, min_size=1, max_size=6)), np.int64))
    for token in draw(ids):
        buffer.advance_with_token(token)
    if draw(st.booleans()):
        buffer.reset_as_new_prompt()
        if len(buffer) > 1:
            buffer.chunk(draw(st.integers(1, len(buffer) - 1)))
    return buffer


grammar_states = st.builds(
    GrammarState,
    grammar_enforced=st.booleans(),
    in_thinking_region=st.booleans(),
    thinking_end=ids,
    tool_start=ids,
    thinking_match_buffer=ids,
)
context_fields: dict[str, st.SearchStrategy[Any]] = {
    "tokens": token_buffers(),
    "max_length": st.none() | st.integers(100, 1000),
    "request_id": request_id,
    "sampling_params": sampling,
    "eos_tracker": trackers,
    "log_probabilities": st.integers(0, 5),
    "json_schema": st.none() | text,
    "grammar_state": grammar_states,
    "model_name": text,
    "status": status,
    "external_block_metadata": st.none() | st.dictionaries(text, ids, max_size=2),
    "cached_prefix_length": st.none() | i31,
    "index_state": st.builds(IndexState, st.none() | i31, i31, st.integers(-3, 3)),
    "progress": st.builds(Progress, st.just(0), st.dictionaries(i31, logprobs, max_size=2)),
    "draft_state": st.none() | st.builds(SpecDecodingState, ids, ids),
}
contexts = st.builds(TextContext, **context_fields)
images = st.builds(
    ImageMetadata,
    start_idx=i31,
    end_idx=st.just(2**31),
    pixel_values=floats,
    image_hash=st.none() | i31,
    extras=st.dictionaries(text, floats, max_size=2),
)
vision_contexts = context_fields | {
    "tokens": st.builds(lambda n: TokenBuffer(np.array([1, *[9] * n, 2], np.int64)), st.integers(1, 5)),
    "vision_token_ids": st.just([9]),
    "images": floats.map(lambda pixels: [ImageMetadata(start_idx=1, end_idx=2, pixel_values=pixels)]),
}
metadata = st.builds(
    AudioGenerationMetadata,
    sample_rate=st.none() | i31,
    duration=st.none() | number,
    final_chunk=st.none() | st.booleans(),
    echo=st.none() | text,
)
speech = st.none() | int64s
chat_messages = st.builds(
    TextGenerationRequestMessage,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=text | st.lists(st.builds(TextContentPart, text=text), max_size=2),
    tool_call_id=st.none() | text,
)
outputs = st.builds(
    TextGenerationOutput, request_id, ids, status, st.none() | st.lists(logprobs, max_size=2), st.none() | i31
)
errors = st.none() | st.builds(RequestError, text, text)

TYPES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (RequestID, request_id),
    (TokenBuffer, token_buffers()),
    (Range, st.builds(Range, st.just(1), st.integers(1, 5))),
    (EOSTracker, trackers),
    (LogProbabilities, logprobs),
    (SamplingParams, sampling),
    (SamplingParamsInput, st.builds(SamplingParamsInput, top_k=st.none() | i31, stop=st.none() | st.lists(text))),
    (TextContext, contexts),
    (ImageMetadata, images),
    (ReasoningSpan, st.just(ReasoningSpan((1, 9), (2, 8)))),
    (ParsedReasoningDelta, st.builds(ParsedReasoningDelta, st.just(ReasoningSpan((0, 3), (0, 2))), st.booleans())),
    (ParsedToolCallDelta, st.builds(ParsedToolCallDelta, i31, st.none() | text, st.none() | text, st.none() | text)),
    (
        ParsedToolResponse,
        st.builds(ParsedToolResponse, st.none() | text, st.lists(st.builds(ParsedToolCall, text, text, text))),
    ),
    (
        SamplingParamsGenerationConfigDefaults,
        st.builds(SamplingParamsGenerationConfigDefaults, temperature=st.none() | number, eos_token_id=i31 | ids),
    ),
    (TextAndVisionContext, st.builds(TextAndVisionContext, **vision_contexts)),
    (
        SpeechContext,
        st.builds(SpeechContext, **context_fields, audio_prompt_tokens=int64s, buffer_speech_tokens=speech),
    ),
    (
        PoolingContext,
        st.builds(
            PoolingContext.of,
            st.lists(st.lists(i31, min_size=1, max_size=3), min_size=1, max_size=3),
            st.sampled_from(PoolingTask),
            dimensions=st.none() | st.integers(1, 99),
            request_id=request_id,
        ),
    ),
    (
        SynthesisContext,
        st.builds(
            lambda texts, voice, speed: SynthesisContext.of(
                texts, PoolingTask.SPEAK, seeds=np.arange(len(texts)), voice=voice, speed=speed
            ),
            st.lists(st.lists(i31, min_size=1, max_size=3), min_size=1, max_size=3),
            i31,
            st.floats(0.25, 4.0),
        ),
    ),
    (
        ClipContext,
        st.builds(
            lambda length: ClipContext.of_samples(np.linspace(-1, 1, length, dtype=np.float32), RequestID("r"), "m"),
            st.integers(1, 600),
        ),
    ),
    (CodecFacts, st.builds(CodecFacts, i31, i31, st.integers(-1, 99), st.integers(-1, 99))),
    (
        CodecContext,
        st.builds(
            lambda frames, left, right, place: CodecContext.of(
                [range(2 * (left + right + extra)) for extra in frames],
                PoolingTask.DECODE_SPEECH,
                width=2,
                left=left,
                right=right,
                first_frame=place,
            ),
            st.lists(st.integers(1, 3), min_size=1, max_size=3),
            st.integers(0, 3),
            st.integers(0, 3),
            i31,
        ),
    ),
    (
        PaintingContext,
        st.builds(
            lambda images, steps, negative: PaintingContext.of(
                [[1, 2]] * images,
                PoolingTask.PAINT,
                seeds=np.arange(images),
                prompt="a train",
                negative_prompt=negative,
                height=64,
                width=48,
                steps=steps,
            ),
            st.integers(1, 3),
            st.integers(1, 50),
            st.none() | st.text(max_size=3),
        ),
    ),
    (
        PooledValues,
        st.builds(
            lambda rows: PooledValues(np.ones((rows, 2), np.float32), np.ones(rows, np.int32)), st.integers(0, 9)
        ),
    ),
    (PixelContext, st.builds(PixelContext, tokens=token_buffers(), request_id=request_id, latents=floats)),
    (GrammarEnforcementSnapshot, st.builds(GrammarEnforcementSnapshot, st.booleans(), st.booleans(), ids, ids)),
    (TextGenerationOutput, outputs),
    (
        dict[RequestID, SchedulerResult[TextGenerationOutput]],
        st.dictionaries(
            request_id,
            st.builds(SchedulerResult, st.sampled_from(SchedulerStatus), st.none() | outputs, errors),
            max_size=3,
        ),
    ),
    (EmbeddingsOutput, st.builds(EmbeddingsOutput, floats)),
    (AudioGenerationMetadata, metadata),
    (
        AudioGenerationRequest,
        st.builds(AudioGenerationRequest, request_id, text, text, ids, text, sampling, prompt=st.none() | text | ids),
    ),
    (AudioGenerationResponse, st.builds(AudioGenerationResponse, status, st.none() | floats, speech)),
    (AudioGeneratorOutput, st.builds(AudioGeneratorOutput, floats, metadata, st.booleans(), speech)),
    (AudioGenerationOutput, st.builds(AudioGenerationOutput, status, i31, floats, speech, metadata)),
    (
        tuple[RequestID, LoRARequest],
        st.tuples(request_id, st.builds(LoRARequest, st.sampled_from(LoRAOperation), text, st.none() | text)),
    ),
    (LoRAResponse, st.builds(LoRAResponse, st.sampled_from(LoRAStatus), text | st.lists(text))),
    *((kind, st.sampled_from(kind)) for kind in (BatchType, InputModality, LoRAType, PipelineTask)),
    (list[NDArray[np.float32]], st.lists(floats, max_size=2)),
    (
        TextGenerationRequest,
        st.builds(
            TextGenerationRequest,
            request_id,
            text,
            messages=st.lists(chat_messages, max_size=2),
            tools=st.none() | st.just([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
            response_format=st.none() | st.builds(TextGenerationResponseFormat, text, st.dictionaries(text, i31)),
            sampling_params=sampling,
            sampling=st.none() | st.builds(SamplingParamsInput, seed=i31),
        ),
    ),
    (EmbeddingsGenerationRequest, st.builds(EmbeddingsGenerationRequest, request_id, text, st.text(min_size=1))),
    (
        PixelGenerationRequest,
        st.builds(PixelGenerationRequest, request_id, text, st.text(min_size=1), images=st.lists(st.binary())),
    ),
    (
        OpenResponsesRequest,
        st.builds(
            OpenResponsesRequest,
            request_id=request_id,
            body=st.builds(
                OpenResponsesRequestBody, model=text, input=text, stop=st.none() | text, seed=st.none() | i31
            ),
        ),
    ),
    (
        GenerationOutput,
        st.builds(
            GenerationOutput,
            request_id=request_id,
            final_status=status,
            output=st.lists(
                st.builds(OutputTextContent, text=text) | st.builds(RefusalContent, refusal=text), max_size=2
            ),
        ),
    ),
]


ELSEWHERE = {
    # messages: test_codec.py
    *("Cancel", "Goodbye", "Hello", "Join", "Order", "OrderAnswer", "Results", "Status", "Step", "StepResult"),
    *("Decision", "DecisionsAnswer", "DecisionsInquiry"),
    *("Detach", "Inquiry", "InquiryAnswer", "Retire", "SchedulingOptions", "WorkerGoodbye"),
    *("Ping", "Refusal", "Welcome"),
    *("HiddenStates", "RowGrammar", "SessionAnswer", "SessionMedium", "SessionOrder"),
    *("Submit", "Unknown", "WorkerHello", "WorkerStatus"),
    *("Batch", "BatchResult", "KeptStep", "PixelJoin", "PixelPreview", "PixelResult", "PixelStep", "Ready", "Vectors"),
    *("Dismissal", "KvMoved", "KvPiece", "KvTaken", "ShipKv", "TakeKv", "WorkerLeaves"),
    *("AdapterAnswer", "AdapterFailed", "AdapterLoaded", "AdapterOrder", "AdapterStatus", "DropAdapter", "LoadAdapter"),
    *("GroupSpec", "TensorSpec", "WeightsAnswer", "WeightsCommand", "WeightsOrder", "WeightsReport", "WeightsStatus"),
    "WeightsVersion",
    # what only ever is within one process
    *("AudioGenerationInputs", "EmbeddingsGenerationInputs", "PixelGenerationInputs", "TextGenerationInputs"),
    *("BatchProcessorInputs", "ProcessorInputs", "TokenMark"),
    # requests and parts whose base or whole is tested
    *("TokenRuns", "LogprobReports"),
    *("Request", "ResponseResource", "ImageContentPart", "VideoContentPart", "SharedMemoryArray"),
}


def test_no_public_type_is_forgotten() -> None:
    tested: set[type] = set()

    def walk(hint: Any) -> None:
        for part in typing.get_args(hint):
            walk(part)
        cls = typing.get_origin(hint) or hint
        if isinstance(cls, type) and cls not in tested:
            tested.add(cls)
            if dataclasses.is_dataclass(cls) or issubclass(cls, BaseModel):
                for inner in typing.get_type_hints(cls, include_extras=True).values():
                    walk(inner)

    for type_, _ in TYPES:
        walk(type_)
    public = {name: getattr(interfaces, name) for name in interfaces.__all__}
    data = {
        name: it
        for name, it in public.items()
        if isinstance(it, type) and (dataclasses.is_dataclass(it) or issubclass(it, BaseModel | enum.Enum))
    }
    assert [name for name, it in data.items() if name not in ELSEWHERE and it not in tested] == []


def samples() -> st.SearchStrategy[tuple[Any, Any]]:
    return st.sampled_from(TYPES).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@settings(max_examples=examples(100), deadline=None)
@given(samples())
def test_every_type_survives_the_round_trip(sample: tuple[Any, Any]) -> None:
    type_, value = sample
    assert same(value, msgpack_numpy_decoder(type_)(encode(value)))


@settings(max_examples=examples(130), deadline=None)
@given(samples(), st.data())
def test_corrupt_bytes_give_a_value_or_a_wire_error(sample: tuple[Any, Any], data: st.DataObject) -> None:
    type_, value = sample
    wire = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, max(0, len(wire) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "extend", "swap"]))
        if kind == "flip" and wire:
            wire[position] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del wire[position:]
        elif kind == "extend":
            wire += data.draw(st.binary(max_size=20))
        else:
            wire[position:position] = data.draw(st.binary(max_size=5))
    with contextlib.suppress(WireError):
        msgpack_numpy_decoder(type_)(bytes(wire))


nested = st.recursive(
    st.none() | st.booleans() | i31 | text | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(TYPES), nested)
def test_values_of_other_types_give_a_value_or_a_wire_error(pair: tuple[Any, Any], value: object) -> None:
    with contextlib.suppress(WireError):
        msgpack_numpy_decoder(pair[0])(msgpack.packb(value))


@pytest.mark.parametrize("levels", [1, 100, 1000])
@pytest.mark.parametrize("header", [b"\xdd\x00\x0f\xff\xff", b"\xdf\x00\x0f\xff\xff"])
def test_claimed_lengths_reserve_no_memory(header: bytes, levels: int) -> None:
    wire = header * levels + b"\xc0" * (1_000_000 if levels > 1 else 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (decode, msgpack_numpy_decoder(Any)):
        with pytest.raises(WireError, match=r"not msgpack|nested too deeply"):
            read(wire)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "in KiB"


# What is declared is what comes


class Shape(TypedDict):
    name: str
    size: int


@dataclass
class Box(Generic[T]):
    content: T
    kind: Literal["a", 1] = "a"
    either: int | str | list[int] = 0
    pair: tuple[int, str] = (0, "")
    shape: Shape | None = None
    free: Any = None
    names: set[str] = field(default_factory=set)


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        ({}, "Box.content: missing"),
        ({"content": "x"}, "Box.content: expected int, got str"),
        ({"content": True}, "Box.content: expected int, got bool"),
        ({"content": 1.0}, "Box.content: expected int, got float"),
        ({"content": 1, "kind": True}, "Box.kind: expected int .* got bool"),
        ({"content": 1, "either": [1, "x"]}, r"Box.either\[1\]: expected int"),
        ({"content": 1, "pair": [1]}, "Box.pair: expected array of length 2, got 1"),
        ({"content": 1, "pair": [1, 2]}, r"Box.pair\[1\]: expected str, got int"),
        ({"content": 1, "shape": {"name": "n"}}, r"Box.shape.size: missing"),
        ({"content": 1, "shape": {"name": "n", "size": 1, "x": 2}}, "Box.shape: object contains unknown field x"),
        ({"content": 1, "names": [1]}, r"Box.names\[0\]: expected str"),
        ({"content": 1, "colour": 2}, "Box: object contains unknown field colour"),
        ([1], "Box: expected object, got array"),
    ],
)
def test_errors_name_the_path(form: object, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        msgpack_numpy_decoder(Box[int])(msgpack.packb(form))


def test_declared_forms() -> None:
    box = Box([1], 1, [2], (3, "x"), {"name": "n", "size": 4}, {"a": [None, b"x"]}, {"q"})
    assert msgpack_numpy_decoder(Box[list[int]])(encode(box)) == box


def test_tagged_types_leave_out_defaults_and_check_their_name() -> None:
    form = msgpack.unpackb(encode(AudioGenerationMetadata(sample_rate=0)))
    assert form == {"type": "AudioGenerationMetadata", "sample_rate": 0}
    with pytest.raises(WireError, match="expected a AudioGenerationMetadata, got a 'Other'"):
        msgpack_numpy_decoder(AudioGenerationMetadata)(msgpack.packb({"type": "Other"}))
    untagged = msgpack.unpackb(encode(TextGenerationOutput(RequestID("r"), [1], GenerationStatus.ACTIVE)))
    untagged["type"] = "Whatever"
    assert msgpack_numpy_decoder(TextGenerationOutput)(msgpack.packb(untagged)).tokens == [1]


def test_pydantic_objects_are_tagged_and_only_what_is_declared_is_built() -> None:
    form = msgpack.unpackb(encode(EOSTracker(eos_token_ids={3})))
    assert form["__pydantic__"] is True
    assert form["type"] == "interfaces.context.stopping.EOSTracker"
    for change in ({"type": "os.system"}, {"type": 3}, {"__pydantic__": 1}, {"data": {"eos_token_ids": ["3"]}}):
        with pytest.raises(WireError, match="EOSTracker"):
            msgpack_numpy_decoder(EOSTracker)(msgpack.packb(form | change))
    assert msgpack_numpy_decoder(Any)(msgpack.packb(form)) == form, "undeclared, it stays a map"


def test_arrays_inside_pydantic_objects_come_back_as_arrays() -> None:
    frames = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    sent = GenerationOutput(
        request_id=RequestID("r"),
        final_status=GenerationStatus.END_OF_SEQUENCE,
        output=[OutputVideoContent.from_numpy_frames(frames)],
    )
    received = msgpack_numpy_decoder(GenerationOutput)(encode(sent))
    assert isinstance(received.output[0], OutputVideoContent)
    assert received.output[0].frames is not None
    np.testing.assert_array_equal(received.output[0].frames, frames)


class Unknown:
    pass


def endless() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (Unknown(), "Unknown has no place"),
        ({"a": [Unknown()]}, "Unknown has no place"),
        (print, "cannot cross a process boundary"),
        (SamplingParams(logits_processors=[lambda inputs: None]), "cannot cross a process boundary"),
        (np.array([Unknown()]), "object"),
        (np.zeros(2, [("a", "i4")]), "dtype"),
        (np.array(["text"]), "dtype"),
        (2**64, "64 bits"),
        (endless(), "no place on the wire"),
    ],
)
def test_what_has_no_place_on_the_wire_is_a_type_error(value: object, complaint: str) -> None:
    for encoder in (encode, msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=0)):
        with pytest.raises(TypeError, match=complaint):
            encoder(value)
    assert msgpack_numpy_decoder(int)(encode(5)) == 5, "an encoder that failed still works"


@pytest.mark.parametrize("type_", [Unknown, Callable[[], None] | Unknown, list[Unknown]])
def test_types_that_cannot_be_declared_are_a_type_error(type_: object) -> None:
    with pytest.raises(TypeError, match="no place on the wire"):
        msgpack_numpy_decoder(type_)


def test_bytes_nested_beyond_reason_are_refused() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    form = {"__pydantic__": True, "type": "interfaces.context.stopping.EOSTracker", "data": deep}
    with pytest.raises(WireError, match="nested"):
        msgpack_numpy_decoder(EOSTracker)(msgpack.packb(form))
    with pytest.raises(WireError):
        msgpack_numpy_decoder(Any)(b"\x91" * 100_000 + b"\x01")
