"""Columns that travel together arrive as they were."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_worker.device_copy import Download, packed_together, upload_together

shapes = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5)


@given(shapes=shapes, seed=st.integers(0, 1 << 30))
def test_columns_keep_their_shapes_and_values(shapes: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32) for shape in shapes]
    kinds = (np.int32, np.int64, np.float64, np.uint8)
    arrays = [array.astype(kinds[rng.integers(len(kinds))]) for array in arrays]
    for uploaded in (upload_together(arrays, torch.device("cpu")), packed_together(arrays, torch.device("cpu"))):
        for array, tensor in zip(arrays, uploaded, strict=True):
            np.testing.assert_array_equal(Download(tensor).wait(), array)
            assert tensor.numpy().dtype == array.dtype
            assert tuple(tensor.shape) == array.shape
