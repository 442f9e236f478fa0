"""Errors about records: the peer's own text may look like a path."""

from __future__ import annotations

import msgpack
import pytest

from interfaces import PoolingContext, PoolingTask, SamplingParams, WireError
from interfaces.wire.codec import msgpack_numpy_decoder, msgpack_numpy_encoder

LIKE_PATHS = (" - at `.zzz`", " - at `[...]`", " - at `[9]`", "x - at `$.zzz` - at `[9]", " - at `", "`")


@pytest.mark.parametrize("text", LIKE_PATHS)
def test_a_name_of_a_field_that_looks_like_a_path_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="unknown field"):
        msgpack_numpy_decoder(SamplingParams)(msgpack.packb({text: 1}))


@pytest.mark.parametrize("text", LIKE_PATHS)
def test_a_task_that_looks_like_a_path_is_refused(text: str) -> None:
    wire = msgpack_numpy_encoder()(PoolingContext.of([[1]], PoolingTask.EMBED))
    sent = msgpack.unpackb(bytes(wire))
    sent["task"] = text
    with pytest.raises(WireError, match="invalid enum value"):
        msgpack_numpy_decoder(PoolingContext)(msgpack.packb(sent))
