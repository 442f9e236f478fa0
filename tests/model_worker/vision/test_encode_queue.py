"""Images of rows are encoded beside the steps: equal ones once, also where they wait together."""

from __future__ import annotations

import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from interfaces import Join, SamplingParams
from model_worker.execution.images import encode_queue, image_rows
from model_worker.vision.encode_queue import ALL_TOKENS
from tests.model_worker.vision.tiny_composites import llava
from tests.model_worker.vision.tiny_parts import Tiny, made
from tests.system.in_process import load


def join(tiny: Tiny, row: int, arrays: dict[str, Tensor], image_hash: int) -> Join:
    tokens, (start,) = tiny.prompt([[3], [7, 8]])
    image = tiny.image(arrays, start, image_hash)
    return Join(row, tokens.astype(np.int32), len(tokens), 0, SamplingParams(max_new_tokens=1), images=[image])


def test_equal_images_that_wait_together_are_encoded_once(tmp_path: Path) -> None:
    tiny = made(llava)
    tiny.model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    rows = image_rows(loaded)
    assert rows is not None
    composite: Any = rows.encoder.composite
    encode = composite.get_image_features
    calls = 0
    last = threading.Event()

    def counted(**arrays: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            last.set()
        return encode(**arrays)

    composite.get_image_features = counted
    queue = encode_queue(rows)
    one, other = tiny.draw(), tiny.draw()
    for row, (arrays, image_hash) in enumerate([(one, 5), (one, 5), (one, 5), (other, 6)]):
        rows.join(join(tiny, row, arrays, image_hash), 9)
    # The images of the first rows were passed over by then, before any of their features was taken.
    assert last.wait(120), "the other image was not encoded"
    ready: dict[int, tuple[int, float]] = {}
    while len(ready) < 4:
        assert select.select([queue], [], [], 120)[0]
        ready |= {found.row: (found.upto, found.seconds) for found in queue.take()}
    assert calls == queue.encoded == 2
    assert {upto for upto, _ in ready.values()} == {ALL_TOKENS}
    assert [seconds > 0 for _, seconds in ready.values()] == [True, False, False, True]
    assert queue.seconds > 0
