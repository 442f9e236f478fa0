"""Arrays on the wire: inline and in shared memory, and what is refused in their place."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from interfaces.wire.codec import WireError, msgpack_numpy_decoder, msgpack_numpy_encoder
from interfaces.wire.shared_memory import SharedMemoryArray

encode = msgpack_numpy_encoder()


@given(hnp.arrays(hnp.scalar_dtypes().filter(lambda d: d.kind in "iufb"), hnp.array_shapes(min_dims=0, min_side=0)))
def test_arrays_of_numbers_survive(array: NDArray[Any]) -> None:
    native = array.astype(array.dtype.newbyteorder("="))
    for value in (array, array.T, array[..., ::2] if array.ndim else array):
        received = msgpack_numpy_decoder(np.ndarray)(encode(value))
        np.testing.assert_array_equal(received, value)
        assert received.dtype == native.dtype


def test_copies_are_writable_and_views_are_not() -> None:
    wire = encode(np.arange(5))
    copy = msgpack_numpy_decoder(np.ndarray)(wire)
    copy[0] = 9
    view = msgpack_numpy_decoder(np.ndarray, copy=False)(wire)
    assert view[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_the_inline_form_and_its_spellings() -> None:
    form = msgpack.unpackb(encode(np.array([[1, 2]], np.float32)))
    assert form == {
        "__np__": True,
        "data": np.array([1, 2], np.float32).tobytes(),
        "shape": [1, 2],
        "dtype": "float32",
    }
    for dtype in ("float32", "<f4"):
        array = msgpack_numpy_decoder(NDArray[np.float32])(msgpack.packb(form | {"dtype": dtype}))
        assert array.tolist() == [[1, 2]]
    with pytest.raises(WireError, match="expected an array of int64, got float32"):
        msgpack_numpy_decoder(NDArray[np.int64])(msgpack.packb(form))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"dtype": "O"},
        {"dtype": "U4"},
        {"dtype": "f4,f4"},
        {"dtype": "x" * 100},
        {"dtype": 4},
        {"shape": [3]},
        {"shape": [-1, 2]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 100},
        {"shape": "2"},
        {"data": "text"},
        {"__np__": 1},
    ],
)
def test_malformed_arrays_are_refused(change: dict[str, object]) -> None:
    form = {"__np__": True, "data": bytes(8), "shape": [1, 2], "dtype": "float32"} | change
    with pytest.raises(WireError):
        msgpack_numpy_decoder(np.ndarray)(msgpack.packb(form))


def test_codecs_can_be_pickled() -> None:
    encoder = pickle.loads(pickle.dumps(msgpack_numpy_encoder(True, 5)))
    assert (encoder.use_shared_memory, encoder.shared_memory_threshold) == (True, 5)
    decoder = pickle.loads(pickle.dumps(msgpack_numpy_decoder(dict[str, NDArray[np.int64]], False, ipc_peer=True)))
    received = decoder(encoder({"a": np.arange(3)}))
    assert received["a"].tolist() == [0, 1, 2]
    assert not received["a"].flags.writeable


def test_shared_arrays_are_accepted_from_this_host_only() -> None:
    encoder = msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=16)
    small, large = np.arange(1), np.arange(100).reshape(10, 10)
    wire = encoder([small, large])
    forms = msgpack.unpackb(wire)
    assert ("__np__" in forms[0], "__shm__" in forms[1]) == (True, True)
    assert forms[1]["dtype"] == "<i8"
    for _ in range(2):
        received = msgpack_numpy_decoder(list[np.ndarray], ipc_peer=True)(wire)
        np.testing.assert_array_equal(received[1], large)
        received[1][0] = -1
    placeholders = msgpack_numpy_decoder(SharedMemoryArray, ipc_peer=True)(msgpack.packb(forms[1]))
    assert placeholders == encoder.segments.take()[0]
    assert encode(placeholders) == msgpack.packb(forms[1])
    with pytest.raises(WireError, match=r"list\[1\]: .* from peers on this host only"):
        msgpack_numpy_decoder(list[np.ndarray])(wire)
    encoder.segments.release_all()
    with pytest.raises(WireError, match="cannot be opened"):
        msgpack_numpy_decoder(list[np.ndarray], ipc_peer=True)(wire)


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "tokenyard-1-2-3-../../x", "other", "", "tokenyard-1-2-3-0123456789abcdeg"],
)
def test_names_that_are_not_ours_are_refused(name: str) -> None:
    form = {"__shm__": True, "name": name, "shape": [1], "dtype": "<i8"}
    with pytest.raises(WireError, match="not the name of a segment"):
        msgpack_numpy_decoder(np.ndarray, ipc_peer=True)(msgpack.packb(form))
